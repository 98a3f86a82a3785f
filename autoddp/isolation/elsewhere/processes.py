"""Checks the programs that the script starts, its signals, and what it changes of other processes, before it does."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from autoddp.isolation.elsewhere import commands
from autoddp.isolation.elsewhere.own import is_own_process
from autoddp.isolation.elsewhere.patch import Stop
from autoddp.isolation.hooks import check_events, rebind, when_imported
from autoddp.isolation.pipes import Pipes


def watch_processes(stop: Stop, pipes: Pipes) -> None:
    """Watch from now on: programs by their words, signals and priorities by the process that they are for."""
    judge_words = functools.partial(commands.judge_words, are_others=pipes.are_others)
    judge_shell = functools.partial(commands.judge_shell, are_others=pipes.are_others)
    judges: dict[str, Callable[..., str]] = {
        "subprocess.Popen": lambda executable, args, cwd, env: judge_words(_words(args, executable), _text(cwd), env),
        "os.system": lambda command: judge_shell(_text(command)),
        "os.exec": lambda path, args, env: judge_words(_words(args, path), env=env),
        "os.posix_spawn": lambda path, args, env: judge_words(_words(args, path), env=env),
        "os.spawn": lambda mode, path, args, env: judge_words(_words(args, path), env=env),
        "pty.spawn": lambda args: judge_words(_words(args)),
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


def _check(judge: Callable[..., str], stop: Stop, *arguments: Any) -> None:
    try:
        said = judge(*arguments)
    except Exception:  # arguments that the call itself will refuse
        said = ""
    if said:
        stop(said)


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
    """For signal.pidfd_send_signal. The kernel says -1 of a process that has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        pid = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
    return _signal(pid, number) if pid > 0 else ""


def _limits(pid: int, _resource: int, limits: Any = None) -> str:
    """Whose limits resource.prlimit would change; "" for those of this process, or where it only reads."""
    return "" if limits is None or not pid or is_own_process(pid) else f"resource.prlimit changes {_whose(pid)}"


def _scheduling(name: str, pid: int, *_more: Any) -> str:
    """For those functions of os that change how a process or a thread is scheduled; 0 is this one."""
    return "" if not pid or is_own_process(pid) else f"os.{name} changes {_whose(pid)}"


def _priority(which: int, who: int, _priority: int) -> str:
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
    def judged(*arguments: Any) -> Any:
        _check(judge, stop, *arguments)
        return function(*arguments)

    return judged
