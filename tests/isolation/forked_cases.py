"""Runs code of a script in a fork of its own: what would end tuning ends the fork, and the reason is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

_told = -1


def end(code: int, said: str) -> NoReturn:
    """In the fork: its last word and its exit code."""
    os.write(_told, said.encode())
    os._exit(code)


def stop(reason: str) -> NoReturn:
    """In place of the launcher's: code 77."""
    end(77, reason)


def outcome(case: Callable[[], None]) -> tuple[int, str]:
    """The exit code of a fork that calls `case`, and what it has said: 0 and nothing if no exception came."""
    global _told
    heard, _told = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            case()
            os._exit(0)
        except BaseException as error:
            end(1, repr(error))
    os.close(_told)
    with open(heard) as answer:
        said = answer.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said
