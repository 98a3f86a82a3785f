"""Programs that the script starts: they see and write the real files, so only what is known to read is let through."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoddp.isolation.guard.install import rebind
from autoddp.isolation.guard.native import Native
from autoddp.isolation.guard.reports import only_reports
from autoddp.isolation.plan import VARIABLE, IsolationPlan

INJECT = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "worker", "inject")
"""The folder whose sitecustomize starts the guard in Python processes of the script."""

_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash"}
_COMPILERS = re.compile(r"([a-z0-9_]+-[a-z0-9_-]*)?(gcc|g\+\+|cc|c\+\+|clang|clang\+\+|ptxas)(-[0-9.]+)?$")
_NO_EFFECT = re.compile(r"\s*([12&]?>>?\s*/dev/null|2>&1)(?=\s|$|\|)")
_SHELL_SYNTAX = re.compile(r"[;&<>$`*?\[\]{}~()\n\\#!]")

_READS = {
    "cat",
    "head",
    "tail",
    "wc",
    "ls",
    "du",
    "md5sum",
    "sha1sum",
    "sha256sum",
    "grep",
    "ldd",
    "readelf",
    "nm",
    "stat",
}
_ALWAYS_STOPPED = set(
    "chmod chown chgrp touch setfattr setfacl chattr cp mv rm ln install rsync tar unzip dd truncate tee sed find xargs"
    " sudo su doas env nohup nice setsid time timeout stdbuf perl ruby node awk make ninja cmake docker mount".split()
)


class Programs:
    """`check` stops, or gives back what to start: paths of known compilers are translated."""

    def __init__(self, native: Native, plan: IsolationPlan) -> None:
        self.native = native
        self.overlay = native.overlay
        self.plan = plan
        self.landlock = plan.landlock
        self.checks: dict[str, Callable[..., None]] = {
            "os.exec": lambda path, arguments, env: self.unchanged(arguments, path, None, env),
            "os.posix_spawn": lambda path, arguments, env: self.unchanged(arguments, path, None, env),
            "os.system": lambda command: self.unchanged(["/bin/sh", "-c", command], "/bin/sh", None, None),
        }

    def start(self) -> None:
        """`subprocess` and `multiprocessing` both start programs by this function."""
        module = importlib.import_module("_posixsubprocess")
        fork_exec = module.fork_exec

        def checked(words: Any, files: Any, close_fds: Any, keep: Any, cwd: Any, env: Any, *more: Any) -> Any:
            new, cwd, env = self.check(list(words), list(files), cwd, env)
            return fork_exec(new, files, close_fds, keep, cwd, env, *more)

        rebind({id(fork_exec): (fork_exec, checked)})

    def unchanged(self, words: Sequence[Any], path: Any, cwd: Any, env: Any) -> None:
        """For ways of starting a program in which no word can be replaced."""
        if isinstance(path, (str, bytes)) and b"/" in os.fsencode(path):
            try:
                if not self.overlay.resolve(os.fsdecode(path), real_only=True).exists:
                    return  # the kernel says so; os.execvp tries every folder of PATH
            except OSError:
                return
        plain = [os.fsdecode(word) for word in words]
        new, _, new_env = self.check(plain, [path], cwd, env)
        if new != plain or new_env is not env:
            self.native.changes.stop(f"{shlex.join(plain)[:200]}, with paths that the guard redirects")

    def check(self, words: Sequence[Any], files: Sequence[Any], cwd: Any, env: Any) -> tuple[list[Any], Any, Any]:
        """The words, the folder and the environment to start a program with."""
        plain = [os.fsdecode(word) for word in words]
        program = os.fsdecode(files[0]) if len(files) == 1 else plain[0]
        where = None if cwd is None else self._folder(cwd)
        if self._is_our_python(program, plain):
            return [self._translated(word, cwd) for word in plain], where, self._with_guard(env)
        if _COMPILERS.fullmatch(os.path.basename(program)) and self._is_installed(program):
            return self._compiling(plain, cwd), where, self._with_temporary_folder(env)
        if os.path.basename(program) == "openssl" and len(plain) == 3 and plain[1].startswith("sha"):
            return [*plain[:2], self._translated(plain[2], cwd)], where, env  # torch.compile's name for a header
        why = self._refused(program, plain, cwd, _environment(env))
        if why:
            self.native.changes.stop(f"{shlex.join(plain)[:200]}: {why}")
        return list(words), where, env

    def _folder(self, cwd: Any) -> Any:
        """Where a program can really be started; one that is missing is the caller's error."""
        try:
            place = self.overlay.resolve(os.fsdecode(cwd))
            if not place.is_folder:
                return cwd
            folder = self.overlay.folder(place)
            if folder.lower == folder.path:
                return folder.lower
            with self.overlay.turns.taken():
                self.native.changes.ensure(folder)
            return self.overlay.upper + folder.path
        except OSError:
            return cwd

    def _with_guard(self, env: Any) -> Any:
        """An environment by which Python starts the guard; some libraries give their children one of their own."""
        given = dict(_environment(env))
        path = given.get("PYTHONPATH", "")
        if VARIABLE in given and INJECT in path.split(os.pathsep):
            return env
        given[VARIABLE] = self.plan.text()
        given["PYTHONPATH"] = f"{INJECT}{os.pathsep}{path}" if path else INJECT
        return [os.fsencode(f"{name}={value}") for name, value in given.items()]

    def _is_our_python(self, program: str, words: list[str]) -> bool:
        """This interpreter, with options under which it heeds its environment and imports sitecustomize."""
        mine = {os.path.abspath(sys.executable), os.path.realpath(sys.executable)}
        if program not in mine and os.path.realpath(program) not in mine:
            return False
        for word in words[1:]:
            if word in ("-c", "-m", "-") or not word.startswith("-"):
                break
            if not word.startswith(("--", "-X", "-W")) and set(word) & set("EIS"):
                return False
        return True

    def _is_installed(self, program: str) -> bool:
        """Found on PATH or a program of the system or of an installed package: not a script of the user's."""
        return "/" not in program or program.startswith(("/usr/", "/bin/", "/sbin/", "/opt/", sys.prefix + "/"))

    def _refused(self, program: str, words: list[str], cwd: Any, env: Mapping[str, str]) -> str:
        """Why a program may not be started; empty if it may."""
        name, arguments = os.path.basename(program), words[1:]
        if name in _SHELLS:
            return self._refused_shell(arguments, cwd, env)
        if not self._is_installed(program):
            return "a program of one's own may write files"
        if name in _ALWAYS_STOPPED:
            return "the program changes files or starts others"
        if only_reports(name, arguments, env, self.landlock):
            return ""
        changed = [word for word in arguments if self._place(word, cwd, changed_only=True)]
        if name in _READS:
            return f"it would not see what the script has written to {changed[0]}" if changed else ""
        if not self.landlock:
            return "it may write files (this kernel has no Landlock)"
        named = [word for word in arguments if self._place(word, cwd)]
        if named or cwd is not None:
            return f"it may change {named[0] if named else os.fsdecode(cwd)}"
        return ""

    def _refused_shell(self, arguments: list[str], cwd: Any, env: Mapping[str, str]) -> str:
        if len(arguments) != 2 or arguments[0] != "-c":
            return "a shell script may write files"
        command = _NO_EFFECT.sub(" ", arguments[1])
        if _SHELL_SYNTAX.search(command):
            return "a shell command may write files"
        try:
            parts = [shlex.split(part) for part in command.split("|")]
        except ValueError:
            return "a shell command may write files"
        if not all(parts) or any("=" in part[0] for part in parts):
            return "a shell command may write files"
        if any(part[0] in ("cd", "exec", "eval", "source", ".", "trap", "export", "alias") for part in parts):
            return "a shell command may write files"
        return next(filter(None, (self._refused(part[0], part, cwd, env) for part in parts)), "")

    def _place(self, word: str, cwd: Any, changed_only: bool = False) -> bool:
        """Whether a word or a part of it names something outside the folders where writes are real."""
        for part in {word, *re.split("[=,:]", word), word[2:] if word.startswith("-") else ""}:
            if not part or part.startswith("-"):
                continue
            try:
                place = self.overlay.resolve(self._joined(part, cwd))
                kernels = self.overlay.resolve(self._joined(part, cwd), real_only=True)
            except (OSError, ValueError):
                continue
            if place.through:
                continue
            if place.upper or place.exists != kernels.exists or place.physical != kernels.physical:
                return place.exists or kernels.exists
            if place.exists and not changed_only:
                return True
        return False

    def _joined(self, path: str, cwd: Any) -> str:
        return path if cwd is None or path.startswith("/") else f"{os.fsdecode(cwd)}/{path}"

    def _translated(self, word: str, cwd: Any) -> str:
        """An input that the script has written, by the path at which it lies."""
        try:
            place = self.overlay.resolve(self._joined(word, cwd)) if word and not word.startswith("-") else None
        except (OSError, ValueError):
            return word
        return place.physical if place is not None and place.exists and place.physical != place.path else word

    def _compiling(self, words: list[str], cwd: Any) -> list[str]:
        new, output = [words[0]], False
        for word in words[1:]:
            if output:
                word = str(self.native.to_write(self._joined(word, cwd)))
            elif word.startswith(("-I", "-L", "-B")) and len(word) > 2:
                word = word[:2] + self._translated(word[2:], cwd)
            elif word.startswith("-o") and len(word) > 2:
                word = "-o" + str(self.native.to_write(self._joined(word[2:], cwd)))
            elif word.startswith(
                ("@", "-M", "-save-temps", "--save-temps", "-fdump", "-fprofile", "--coverage", "-wrapper")
            ):
                self.native.changes.stop(f"{shlex.join(words)[:200]}: {word} writes more files")
            else:
                word = self._translated(word, cwd)
            output = word in ("-o", "--output-file")
            new.append(word)
        silent = ("--version", "-v", "--help", "-E", "-dumpversion", "-dumpmachine", "-V")
        if not any(word.startswith(("-o", "--output-file", "-print")) or word in silent for word in words[1:]):
            self.native.changes.stop(f"{shlex.join(words)[:200]}: it writes beside its input")
        return new

    def _with_temporary_folder(self, env: Any) -> list[bytes]:
        """Compilers write between their steps."""
        given = dict(_environment(env))
        given["TMPDIR"] = f"{self.overlay.scratch}/aside"
        return [os.fsencode(f"{name}={value}") for name, value in given.items()]


def _environment(env: Any) -> Mapping[str, str]:
    """As a mapping: a program gets it as a list, or None for this process's own."""
    if env is None:
        return os.environ
    if isinstance(env, Mapping):
        return {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    pairs = (os.fsdecode(each).partition("=") for each in env)
    return {name: value for name, _, value in pairs}
