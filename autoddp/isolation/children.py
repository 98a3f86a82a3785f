"""Programs that the script starts get the environment by which a Python among them starts autoddp's checks too.

    watch_children(text)     # once in every Python process of a tuning attempt, with the plan's text

A Python imports `inject/sitecustomize.py` at its start if that folder is in its PYTHONPATH. The script may give a
program another PYTHONPATH, or an environment without it; then the folder and the plan are added. Every program gets
them, because a shell or a launcher passes its environment on to the Pythons that it starts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from autoddp.isolation.hooks import rebind

VARIABLE = "AUTODDP_WORKER_ISOLATION"
"""The plan's variable. `inject/sitecustomize.py` spells this name again: it imports nothing."""
_MARK = "autoddp-checks-this-process"
_FIRST_FILES = 32  # descriptors among which the mark mostly is
INJECT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "inject")
"""The folder whose sitecustomize starts the checks in a Python process."""

_PATH = "PYTHONPATH"
_plan = ""


def mark_as_checked() -> bool:
    """Tell those who look at this process that it checks itself, as do its forks; False where that cannot be told.

    The mark is an open file with a name and no content: the kernel closes it where another program takes the place of
    this one. So does a script that closes all files; it then counts as any other program.
    """
    if sys.platform != "linux":
        return False
    from autoddp.isolation.kernel.syscalls import open_nameless

    try:
        open_nameless(_MARK)
    except OSError:  # the kernel refuses it, or no more files may be opened
        return False
    return True


def checks_itself(pid: int) -> bool:
    """Whether a process has that mark. OSError if it must not be looked at, or has ended."""
    mark = f"/memfd:{_MARK} (deleted)"
    # It was one of the first files. A list of all takes the kernel 2 µs for each, and a rank may have thousands.
    for number in chain(range(_FIRST_FILES), _open_files(pid)):
        with contextlib.suppress(FileNotFoundError):  # never opened, or closed at this moment
            if os.readlink(f"/proc/{pid}/fd/{number}") == mark:
                return True
    return False


def _open_files(pid: int) -> Iterator[str]:
    yield from os.listdir(f"/proc/{pid}/fd")


def as_mapping(env: Any) -> Mapping[str, str]:
    """An environment in any form that a function of Python takes, where None is this process's own, as a mapping."""
    if env is None:
        return os.environ
    if isinstance(env, Mapping):
        return {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    pairs = (os.fsdecode(each).partition("=") for each in env)
    return {name: value for name, _, value in pairs}


def as_list(env: Mapping[str, str]) -> list[bytes]:
    """An environment as the kernel takes it."""
    return [os.fsencode(f"{name}={value}") for name, value in env.items()]


def is_watched(env: Mapping[str, str]) -> bool:
    """Whether a Python with this environment starts the checks."""
    return VARIABLE in env and INJECT in env.get("PYTHONPATH", "").split(os.pathsep)


def is_our_python(words: Sequence[str]) -> bool:
    """Whether a program is this interpreter, with options under which it heeds its environment and so checks itself."""
    mine = {os.path.abspath(sys.executable), os.path.realpath(sys.executable)}
    if words[0] not in mine and os.path.realpath(words[0]) not in mine:
        return False
    for word in words[1:]:
        if word in ("-c", "-m", "-") or not word.startswith("-"):
            break
        if not word.startswith(("--", "-X", "-W")) and set(word) & set("EIS"):
            return False
    return True


def watched(env: Any) -> dict[str, str]:
    """An environment, in any form, with what makes Python start the checks."""
    given = dict(as_mapping(env))
    path = given.get("PYTHONPATH", "")
    given.setdefault(VARIABLE, _plan)
    if INJECT not in path.split(os.pathsep):
        given["PYTHONPATH"] = f"{INJECT}{os.pathsep}{path}" if path else INJECT
    return given


def watch_children(plan: str) -> None:
    """Watch children from now on. Every way in which Python starts a program passes through one of these functions."""
    global _plan
    _plan = plan
    makers: dict[str, Callable[[Any], Any]] = {
        "execve": _execve,
        "posix_spawn": _posix_spawn,
        "posix_spawnp": _posix_spawn,
        "putenv": _putenv,
        "unsetenv": _unsetenv,
    }
    new: dict[int, tuple[Any, Any]] = {}
    for name, make in makers.items():
        original = getattr(os, name, None)
        if original is not None:
            new[id(original)] = original, functools.wraps(original)(make(original))
    fork_exec = importlib.import_module("_posixsubprocess").fork_exec  # of subprocess and multiprocessing
    new[id(fork_exec)] = fork_exec, _fork_exec(fork_exec)
    rebind(new)
    supports: set[Any] = os.supports_fd
    supports |= {new[id(each)][1] for each in supports if id(each) in new}


def _repaired(env: Any) -> Any:
    """`env` itself where nothing is missing, or where it is no environment: the call then says so."""
    try:
        return env if is_watched(as_mapping(env)) else watched(env)
    except (TypeError, ValueError, AttributeError):
        return env


def _fork_exec(original: Any) -> Any:
    def fork_exec(words: Any, files: Any, close_fds: Any, keep: Any, cwd: Any, env: Any, *more: Any) -> Any:
        if env is not None and (new := _repaired(env)) is not env:
            env = as_list(new)
        return original(words, files, close_fds, keep, cwd, env, *more)

    return fork_exec


def _execve(original: Any) -> Any:
    def execve(path: Any, argv: Any, env: Any) -> Any:
        return original(path, argv, _repaired(env) if isinstance(env, Mapping) else env)

    return execve


def _posix_spawn(original: Any) -> Any:
    def posix_spawn(path: Any, argv: Any, env: Any, /, **options: Any) -> Any:
        return original(path, argv, _repaired(env) if isinstance(env, Mapping) else env, **options)

    return posix_spawn


def _putenv(original: Any) -> Any:
    """What a script sets all programs get that are given no environment of their own, also past `os.environ`.

    `os.environ` calls this function too. So those programs need no more: their environment starts the checks.
    """

    def putenv(name: Any, value: Any, /) -> Any:
        is_path = os.fsdecode(name) == _PATH
        return original(name, watched({_PATH: os.fsdecode(value)})[_PATH] if is_path else value)

    return putenv


def _unsetenv(original: Any) -> Any:
    def unsetenv(name: Any, /) -> Any:
        stay = {_PATH: INJECT, VARIABLE: _plan}
        return os.putenv(name, stay[os.fsdecode(name)]) if os.fsdecode(name) in stay else original(name)

    return unsetenv
