"""Programs that the script starts: they see and write the real files, so only those that surely only read may start."""

from __future__ import annotations

import functools
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from stat import S_ISREG
from typing import Any

from autoddp.isolation import real
from autoddp.isolation.children import as_list, as_mapping, is_our_python
from autoddp.isolation.guard.native import Native
from autoddp.isolation.hooks import replace_everywhere
from autoddp.isolation.plan import IsolationPlan
from autoddp.isolation.reporting import COMPILERS, READERS, SHELLS, only_reports, pipeline

_ALWAYS_STOPPED = frozenset(
    "chmod chown chgrp touch setfattr setfacl chattr cp mv rm ln install rsync tar unzip dd truncate tee sed find xargs"
    " sudo su doas env nohup nice setsid time timeout stdbuf perl ruby node awk make ninja cmake docker mount".split()
)
_MORE_OUTPUTS = ("@", "-M", "-save-temps", "--save-temps", "-fdump", "-fprofile", "--coverage", "-wrapper")
"""Beginnings of a compiler's options by which it writes, or may write, more than its output."""
_NO_OUTPUT = frozenset("--version -v --help -E -dumpversion -dumpmachine -V".split())


class Programs:
    """`check` ends tuning, or returns what to start: paths in the words of known compilers are translated."""

    def __init__(self, native: Native, plan: IsolationPlan) -> None:
        self.native = native
        self.view = native.view
        self.landlock = plan.landlock
        self.checks: dict[str, Callable[..., None]] = {
            "os.exec": self._check_unchanged,
            "os.posix_spawn": self._check_unchanged,
            "os.system": lambda command: self._check_unchanged("/bin/sh", ["/bin/sh", "-c", command], None),
        }
        """Checks by audit event."""

    def start(self) -> None:
        """`subprocess` and `multiprocessing` both start programs by `fork_exec`.

        From Python 3.13 on `subprocess` mostly takes posix_spawn, in which no word can be replaced, unless it is told
        not to.
        """
        vars(importlib.import_module("subprocess"))["_USE_POSIX_SPAWN"] = False

        def make(fork_exec: Any) -> Any:
            def checked(words: Any, files: Any, close_fds: Any, keep: Any, cwd: Any, env: Any, *more: Any) -> Any:
                new, cwd, env = self.check(list(words), list(files), cwd, env)
                return fork_exec(new, files, close_fds, keep, cwd, env, *more)

            return checked

        replace_everywhere(importlib.import_module("_posixsubprocess").fork_exec, make)
        for name in ("posix_spawn", "posix_spawnp"):
            replace_everywhere(getattr(os, name, None), self._opens_nothing_else)

    def _opens_nothing_else(self, spawn: Any) -> Any:
        """`posix_spawn`, which must not open a file that the guard would redirect: its audit event does not tell."""

        @functools.wraps(spawn)
        def checked(path: Any, argv: Any, env: Any, /, **options: Any) -> Any:
            for action in options.get("file_actions") or ():
                if action[0] == os.POSIX_SPAWN_OPEN and not self.view.resolve(os.fsdecode(action[2])).direct:
                    self.view.stop(f"os.{spawn.__name__} opens {os.fsdecode(action[2])}, which is not redirected")
            return spawn(path, argv, env, **options)

        return checked

    def _check_unchanged(self, path: Any, words: Sequence[Any], env: Any) -> None:
        """For ways of starting a program in which no word can be replaced."""
        if isinstance(path, (str, bytes)) and b"/" in os.fsencode(path):
            try:
                if not self.view.resolve(os.fsdecode(path), real_only=True).exists:
                    return  # the kernel says so; os.execvp tries every folder of PATH
            except OSError:
                return
        plain = [os.fsdecode(word) for word in words]
        new, _, new_env = self.check(plain, [path], None, env)
        if new != plain or new_env is not env:
            self.view.stop(f"{shlex.join(plain)[:200]}, with paths that the guard redirects")

    def check(self, words: Sequence[Any], files: Sequence[Any], cwd: Any, env: Any) -> tuple[list[Any], Any, Any]:
        """The words, the folder and the environment to start a program with."""
        plain = [os.fsdecode(word) for word in words]
        program = os.fsdecode(files[0]) if len(files) == 1 else plain[0]
        name = os.path.basename(program)
        where = None if cwd is None else self._folder(cwd)
        if is_our_python([_found(files, cwd) or program, *plain[1:]]):
            return [self._translated(word, cwd) for word in plain], where, env
        if COMPILERS.fullmatch(name) and _is_installed(program):
            # Compilers write temporary files between their steps.
            given = {**as_mapping(env), "TMPDIR": f"{self.view.scratch}/aside"}
            return self._compiling(plain, cwd), where, as_list(given)
        if name == "openssl" and len(plain) == 3 and plain[1].startswith("sha"):
            return [*plain[:2], self._translated(plain[2], cwd)], where, env  # torch.compile hashes a header
        why = self._refused(program, plain, cwd, as_mapping(env))
        if why:
            self.view.stop(f"{shlex.join(plain)[:200]}: {why}")
        return list(words), where, env

    def _folder(self, cwd: Any) -> Any:
        """The folder in which a program can really be started; one that is missing is the caller's error."""
        try:
            place = self.view.resolve(os.fsdecode(cwd))
            return self.view.real_folder(self.view.folder(place)) if place.is_folder else cwd
        except OSError:
            return cwd

    def _refused(self, program: str, words: list[str], cwd: Any, env: Mapping[str, str]) -> str:
        """Why a program may not be started; empty if it may."""
        name, arguments = os.path.basename(program), words[1:]
        if name in SHELLS:
            return self._refused_shell(arguments, cwd, env)
        if not _is_installed(program):
            return "a program of one's own may write files"
        if name in _ALWAYS_STOPPED:
            return "the program changes files or starts others"
        if only_reports(name, arguments, env, self.landlock):
            return ""
        if name in READERS:
            changed = [word for word in arguments if self._names_file(word, cwd, changed_only=True)]
            return f"it would not see what the script has written to {changed[0]}" if changed else ""
        if not self.landlock:
            return "it may write files (this kernel has no Landlock)"
        named = [word for word in arguments if self._names_file(word, cwd)]
        if named or cwd is not None:
            return f"it may change {named[0] if named else os.fsdecode(cwd)}"
        return ""

    def _refused_shell(self, arguments: list[str], cwd: Any, env: Mapping[str, str]) -> str:
        parts = pipeline(arguments)
        if not parts:
            return "a shell command may write files"
        return next(filter(None, (self._refused(part[0], part, cwd, env) for part in parts)), "")

    def _names_file(self, word: str, cwd: Any, changed_only: bool = False) -> bool:
        """Whether a word or a part of it names something outside the folders where writes are real."""
        for part in {word, *re.split("[=,:]", word), word[2:] if word.startswith("-") else ""}:
            if not part or part.startswith("-"):
                continue
            try:
                place = self.view.resolve(_joined(part, cwd))
                kernels = self.view.resolve(_joined(part, cwd), real_only=True)
            except (OSError, ValueError):
                continue
            if place.direct:
                continue
            if place.upper or place.exists != kernels.exists or place.physical != kernels.physical:
                return place.exists or kernels.exists
            if place.exists and not changed_only:
                return True
        return False

    def _translated(self, word: str, cwd: Any) -> str:
        """An input that the script has written, by the path at which it lies; any other word as it is."""
        try:
            place = self.view.resolve(_joined(word, cwd)) if word and not word.startswith("-") else None
        except (OSError, ValueError):
            return word
        return place.physical if place is not None and place.exists and place.physical != place.path else word

    def _compiling(self, words: list[str], cwd: Any) -> list[str]:
        """A compiler's words, with translated paths."""

        def output_path(word: str) -> str:
            return str(self.native.to_write(_joined(word, cwd)))

        new, is_output = [words[0]], False
        for word in words[1:]:
            if is_output:
                word = output_path(word)
            elif word.startswith(("-I", "-L", "-B")) and len(word) > 2:
                word = word[:2] + self._translated(word[2:], cwd)
            elif word.startswith("-o") and len(word) > 2:
                word = "-o" + output_path(word[2:])
            elif word.startswith(_MORE_OUTPUTS):
                self.view.stop(f"{shlex.join(words)[:200]}: {word} writes more files")
            else:
                word = self._translated(word, cwd)
            is_output = word in ("-o", "--output-file")
            new.append(word)
        if not any(word.startswith(("-o", "--output-file", "-print")) or word in _NO_OUTPUT for word in words[1:]):
            self.view.stop(f"{shlex.join(words)[:200]}: it writes beside its input")
        return new


def _joined(path: str, cwd: Any) -> str:
    return path if cwd is None or path.startswith("/") else f"{os.fsdecode(cwd)}/{path}"


def _found(files: Sequence[Any], cwd: Any) -> str:
    """The program that the kernel will start: the first of the places on PATH that has it; "" if none has."""
    places = (_joined(os.fsdecode(file), cwd) for file in files)
    return next((place for place in places if real.access(place, os.X_OK) and S_ISREG(real.stat(place).st_mode)), "")


def _is_installed(program: str) -> bool:
    """Found on PATH or a program of the system or of an installed package: not a script of the user's."""
    return "/" not in program or program.startswith(("/usr/", "/bin/", "/sbin/", "/opt/", sys.prefix + "/"))
