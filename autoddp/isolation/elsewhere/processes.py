"""Checks the programs that the script starts and the signals that it sends, before it does, by audit events."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from autoddp.isolation.elsewhere import commands
from autoddp.isolation.elsewhere.own import is_below
from autoddp.isolation.elsewhere.patch import Stop
from autoddp.isolation.hooks import check_events
from autoddp.isolation.pipes import Pipes


def watch_processes(stop: Stop, pipes: Pipes) -> None:
    """From now on. Programs are known by their words, signals by the process that they go to."""
    judge_words = functools.partial(commands.judge_words, are_others=pipes.are_others)
    judge_shell = functools.partial(commands.judge_shell, are_others=pipes.are_others)
    signals = Signals(os.getppid())
    judges: dict[str, Callable[..., str]] = {
        "subprocess.Popen": lambda executable, args, cwd, env: judge_words(_words(args, executable), _text(cwd), env),
        "os.system": lambda command: judge_shell(_text(command)),
        "os.exec": lambda path, args, env: judge_words(_words(args, path), env=env),
        "os.posix_spawn": lambda path, args, env: judge_words(_words(args, path), env=env),
        "os.spawn": lambda mode, path, args, env: judge_words(_words(args, path), env=env),
        "pty.spawn": lambda args: judge_words(_words(args)),
        "os.kill": signals.judge,
        "os.killpg": signals.judge_group,
    }
    check_events({event: functools.partial(_check, judge, stop) for event, judge in judges.items()})


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


class Signals:
    """Lets signals pass that stay in the attempt: to this process, its parent, and what either of them has started."""

    def __init__(self, parent: int) -> None:
        self._root = parent if parent > 1 else os.getpid()  # 1: this process is an orphan, or first in its container

    def judge(self, pid: int, signal: int) -> str:
        """For os.kill, with its special values of `pid`."""
        if pid < -1:
            return self.judge_group(-pid, signal)
        if pid == -1 and signal:
            return f"os.kill sends signal {int(signal)} to every process"
        if signal == 0 or pid == 0 or self._is_ours(pid):
            return ""
        return f"os.kill sends signal {int(signal)} to process {pid}, which this run did not start"

    def judge_group(self, group: int, signal: int) -> str:
        """For os.killpg: a group has its leader's number."""
        if signal == 0 or group in (0, os.getpgrp()) or self._is_ours(group):
            return ""
        return f"os.killpg sends signal {int(signal)} to group {group}, which this run did not start"

    def _is_ours(self, pid: int) -> bool:
        if not os.path.isdir("/proc/self"):  # not Linux: all processes of the same session pass
            return pid == self._root or _session(pid) in (-1, os.getsid(0))
        return is_below(pid, os.getpid(), self._root)  # if it has ended, the call itself will fail


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1
