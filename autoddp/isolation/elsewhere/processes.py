"""Checks the programs that the script starts, its signals, and what it changes of other processes, before it does.

The kernel shows the keeper what programs do, and the keeper judges that, see `programs`. Here only their words are
looked at: where they name a setting of this machine or a pipe of others, the reason can be told in clear words.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from autoddp.isolation.children import watched
from autoddp.isolation.elsewhere.own import is_own_process, process_of
from autoddp.isolation.elsewhere.patch import Stop
from autoddp.isolation.elsewhere.settings import changed_by
from autoddp.isolation.elsewhere.unwatched import judge_unwatched
from autoddp.isolation.hooks import check_events, rebind, when_imported
from autoddp.isolation.pipes import OTHERS, Pipes

_BREAKS = re.compile(r"""[\s;&|<>()'"=`]+""")
"""What stands between the words of a shell line."""


def watch_processes(stop: Stop, pipes: Pipes, by_kernel: bool) -> None:
    """Watch from now on: programs by their words, signals and priorities by the process that they are for.

    `by_kernel`: whether the kernel shows the keeper what programs do.
    """

    def starts(path: Any, words: Any, env: Any, folder: Any = None) -> str:
        plain = _words(words, path)
        return _names(plain, _text(folder), pipes) or ("" if by_kernel else judge_unwatched(plain, watched(env)))

    judges: dict[str, Callable[..., str]] = {
        "subprocess.Popen": lambda path, words, folder, env: starts(path, words, env, folder),
        "os.system": lambda command: starts("/bin/sh", ["sh", "-c", command], None),
        "os.exec": starts,
        "os.posix_spawn": starts,
        "os.kill": _signal,
        "os.killpg": _signal_to_group,
        "resource.prlimit": _limits,
    }
    check_events({event: functools.partial(_check, judge, stop) for event, judge in judges.items()})
    _watch_functions(stop)
    go_on_after_signals()


def go_on_after_signals() -> None:
    """Make `os.kill` and `os.killpg` call again where a signal has interrupted them.

    The kernel lets no signal interrupt them, but while it holds them for the keeper (see `seccomp`) it does.
    """
    rebind({id(each): (each, _again(each)) for each in (os.kill, os.killpg)})


def _check(judge: Callable[..., str], stop: Stop, *arguments: Any, **named: Any) -> None:
    try:
        said = judge(*arguments, **named)
    except Exception:  # arguments that the call itself will refuse
        said = ""
    if said:
        stop(said)


def _names(words: Sequence[str], folder: str, pipes: Pipes) -> str:
    """What a program's words name that it must not touch: a pipe of others, or a setting that it changes. Else ""."""
    for piece in (piece for word in words for piece in _BREAKS.split(word)):
        if piece and pipes.are_others(os.path.join(folder, piece)):
            return f"{os.path.basename(words[0])} is given {piece}, {OTHERS}"
    return changed_by(words, folder)


def _words(args: Any, executable: Any = None) -> list[str]:
    if isinstance(args, (str, bytes, os.PathLike)):
        return [_text(args)]
    words = [_text(word) for word in args or ()]
    if executable is not None and (not words or os.path.basename(_text(executable)) != os.path.basename(words[0])):
        words = [_text(executable), *words[1:]]  # `executable` is what runs; the first word is only its name
    return words


def _text(value: Any) -> str:
    return "" if value is None else os.fsdecode(value)


def _signal(pid: int, number: int) -> str:
    """For os.kill, with its special values of `pid`. Signals pass that stay in the attempt."""
    if pid < -1:
        return _signal_to_group(-pid, number)
    if pid == -1 and number:
        return f"os.kill sends signal {int(number)} to every process"
    if number == 0 or pid == 0 or is_own_process(pid):
        return ""
    return f"os.kill sends signal {int(number)} to process {pid}, which this run did not start"


def _signal_to_group(group: int, number: int) -> str:
    """For os.killpg: a group has its leader's number."""
    if number == 0 or group in (0, os.getpgrp()) or is_own_process(group):
        return ""
    return f"os.killpg sends signal {int(number)} to group {group}, which this run did not start"


def _signal_by_descriptor(pidfd: int, number: int, *_more: Any) -> str:
    """For signal.pidfd_send_signal."""
    pid = process_of(pidfd)
    return _signal(pid, number) if pid > 0 else ""


def _limits(pid: int, _resource: int, limits: Any = None) -> str:
    """Whose limits resource.prlimit would change; "" for those of this process, or where it only reads."""
    return "" if limits is None or not pid or is_own_process(pid) else f"resource.prlimit changes {_whose(pid)}"


def _scheduling(name: str, pid: int, *_more: Any) -> str:
    """For those functions of os that change how a process or a thread is scheduled; 0 is this one."""
    return "" if not pid or is_own_process(pid) else f"os.{name} changes {_whose(pid)}"


def _priority(which: int, who: int, priority: int) -> str:
    """For os.setpriority, of a process, a group, or all processes of a user."""
    if which == os.PRIO_USER:
        return "os.setpriority changes all processes of a user"
    return _scheduling("setpriority", who)


def _whose(pid: int) -> str:
    return f"process {pid}, which this run did not start"


_WITHOUT_EVENT: dict[str, Callable[..., str]] = {
    "setpriority": _priority,
    **{
        name: functools.partial(_scheduling, name)
        for name in ("sched_setaffinity", "sched_setscheduler", "sched_setparam")
    },
}
"""Functions of `os` that change another process, and of which Python reports no audit event."""


def _watch_functions(stop: Stop) -> None:
    """Replace the functions of which there is no audit event."""
    found = [(getattr(os, name, None), judge) for name, judge in _WITHOUT_EVENT.items()]
    rebind({id(each): (each, _judged(each, judge, stop)) for each, judge in found if each is not None})

    def patch(module: ModuleType) -> None:
        send = getattr(module, "pidfd_send_signal", None)
        if send is not None:
            rebind({id(send): (send, _again(_judged(send, _signal_by_descriptor, stop)))})

    when_imported("signal", patch)


def _again(function: Any) -> Any:
    @functools.wraps(function)
    def again(*arguments: Any) -> Any:
        while True:
            with contextlib.suppress(InterruptedError):
                return function(*arguments)

    return again


def _judged(function: Any, judge: Callable[..., str], stop: Stop) -> Any:
    @functools.wraps(function)
    def judged(*arguments: Any, **named: Any) -> Any:
        _check(judge, stop, *arguments, **named)
        return function(*arguments, **named)

    return judged
