"""The user's script: where its file is, and what its own source says of its command line. Nothing of it is run."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import glob
import hashlib
import importlib.util
import os
import re
import shutil
import sysconfig
import tokenize
import warnings
from collections import deque
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from autoddp.errors import UsageError, did_you_mean

_MOST = 8 * 2**20  # characters of source that are read: some seconds
COMMANDS = ("bench", "completion", "diagnose", "job", "predict", "probe", "recipe", "report", "wrap")
"""Commands of autoddp: what may stand in a script's place."""


def is_command(word: str) -> bool:
    """Whether it names a command of autoddp, and nothing here that Python can run: that would be a script."""
    return word in COMMANDS and (not os.path.exists(word) or _is_mere_folder(word))


def _is_mere_folder(path: str) -> bool:
    """Whether it is a folder in which Python finds nothing to run."""
    return os.path.isdir(path) and not any(Path(path, f"__main__.{kind}").is_file() for kind in ("py", "pyc"))


def script_path(torchrun: argparse.Namespace) -> Path | None:
    """The script's file, or None where there is none to read.

    That is so of a program that is found by PATH, of an unknown module, and of standard input.
    """
    if is_standard_input(torchrun):
        return None
    if not torchrun.module:
        path = Path(torchrun.training_script)
        return path / "__main__.py" if os.path.isdir(path) and not torchrun.no_python else path
    found = list(_files_of_module(torchrun.training_script, _roots(Path.cwd())))
    last = found[-1] if found else Path()
    if last.name == "__init__.py" and last.parent.name == torchrun.training_script.rpartition(".")[2]:
        return last.with_name("__main__.py")
    return last if last.stem == torchrun.training_script.rpartition(".")[2] else None


def is_standard_input(torchrun: argparse.Namespace) -> bool:
    """Whether the script is what Python reads from standard input: `torchrun - < train.py`."""
    is_named_so = torchrun.training_script == "-"
    return is_named_so and not (torchrun.module or torchrun.no_python or torchrun.run_path)


def require_current_folder() -> None:
    """UsageError where the current folder was removed: torch cannot be imported there, and paths are made of it."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(f"the current folder is not there any more ({error.strerror}): cd to it again") from None


def come_back_to(folder: str) -> str:
    """Go to the folder that is at this path now, if the current one was removed meanwhile; a line for the user, or "".

    Whoever copies a project anew, as by `rsync` or git, may have made it again. Without one torch can be imported by no
    process that starts here.
    """
    try:
        os.getcwd()
    except OSError:
        with contextlib.suppress(OSError):
            os.chdir(folder)
            return "the current folder was removed meanwhile and made again: the job starts in the new one"
        return "warning: the current folder was removed meanwhile, and torch cannot be imported there"
    return ""


def require_script(torchrun: argparse.Namespace) -> None:
    """UsageError if there is nothing to run under that name."""
    script = torchrun.training_script
    if torchrun.module and torchrun.no_python:
        raise UsageError("--no-python starts a program, and --module a module of Python: leave out one of them")
    if torchrun.module:
        return  # `python -m` itself knows best where modules are found
    if not script:
        raise UsageError("the script's name is empty: autoddp [options] train.py [its arguments]")
    if torchrun.no_python:
        return _require_program(script)
    if is_standard_input(torchrun):
        return
    if not os.path.exists(script):
        if shutil.which(script):
            either = f"leave it out, or write autoddp wrap {script} … if it starts torchrun"
            raise UsageError(f"{script} is a program, and no script in {Path.cwd()}: {either}, or --no-python {script}")
        meant = did_you_mean(script, COMMANDS) if script.isalpha() else ""
        raise UsageError(
            f"script not found: {script}{meant} (looked in {Path.cwd()}); check the path, or -m for a module"
        )
    if _is_mere_folder(script):
        raise UsageError(f"{script} is a folder without a __main__.py: name the script in it")
    if not os.access(script, os.R_OK):
        raise UsageError(f"{script} cannot be read by this user: see its mode and its owner (ls -l)")
    if Path(script).suffix == ".ipynb":
        raise UsageError(f"{script} is a notebook, which Python cannot run: jupyter nbconvert --to script {script}")


def _require_program(name: str) -> None:
    """UsageError for a program that the system does not start under that name: it looks along PATH, as shells do."""
    if shutil.which(name):
        return
    if not os.path.exists(name):
        raise UsageError(f"program not found: {name} (looked in {Path.cwd()}), nor along PATH; check its name")
    if os.path.isdir(name):
        raise UsageError(f"{name} is a folder, and --no-python starts a program: name a program")
    if not os.access(name, os.X_OK):
        raise UsageError(f"{name} may not be executed, and --no-python starts it as a program: chmod +x {name}")
    raise UsageError(f"{name} is not along PATH, and --no-python looks nowhere else for a bare name: write ./{name}")


def script_digest(torchrun: argparse.Namespace) -> str:
    """12 hex digits over the script and the user's own modules that it imports; "" where they cannot be read."""
    try:
        contents = sorted(hashlib.sha256(path.read_bytes()).digest() for path in ScriptSource(torchrun).files)
    except OSError:
        return ""
    return hashlib.sha256(b"".join(contents)).hexdigest()[:12] if contents else ""


class ScriptSource:
    """The Python source of a script and of the user's own modules that it imports, also those that they import.

    Modules of Python itself and of installed packages do not count, except those of the package that the script is in.
    Nor does torch, which its developers have in their own folder. Of a library as large, the rest is left unread.
    """

    def __init__(self, torchrun: argparse.Namespace) -> None:
        self.readable = False
        """Whether the script is Python source, and all was read; a program, a pipe or an unknown module is not."""
        self.files: list[Path] = []
        """The files that were read, the script's first."""
        self._names: set[str] = set()
        self._strings: set[str] = set()
        self._words: set[str] | None = None
        path = None if torchrun.no_python else script_path(torchrun)
        if path is not None and os.path.isfile(path):  # a pipe can be read only once: its content is the script's
            self._read(path, torchrun)

    def may_have(self, option: str) -> bool:
        """Whether the script may understand `option`, such as --trials; yes where its source cannot be read.

        argparse and click write the option out, or a longer one of which it is an abbreviation. Others make it of a
        field, a parameter, a variable or a key. To mistake such a name for an option costs the user one word in
        another place; to overlook an option would cost a wrong training.
        """
        name = option.removeprefix("--").replace("-", "_")
        written_out = re.compile(rf"(?<![\w-]){re.escape(option)}")
        key = re.compile(rf"{name}([-_=:]|$)")
        return (
            not self.readable
            or any(used == name or used.startswith(f"{name}_") for used in self._names)
            or any(written_out.search(text) or key.match(text) for text in self._strings)
        )

    def declares(self, option: str) -> bool:
        """Whether the option is written out in the source, as argparse and click want it."""
        return option in self._strings

    def mentions(self, variable: str) -> bool:
        """Whether the script may read that variable of the environment: its name is written there, in any case."""
        if self._words is None:
            texts = [*self._names, *self._strings]
            self._words = {word.casefold() for text in texts for word in re.findall(r"\w+", text)}
        return variable.casefold() in self._words

    def wants_local_rank(self) -> str:
        """The option by which the script wants its local rank from its launcher, or ""."""
        if any("LOCAL_RANK" in text for text in self._strings):
            return ""
        return next((option for option in ("--local-rank", "--local_rank") if option in self._strings), "")

    def _read(self, script: Path, torchrun: argparse.Namespace) -> None:
        roots = _roots(Path.cwd() if torchrun.module else _folder_of(script, torchrun))
        own_package = torchrun.training_script.partition(".")[0] if torchrun.module else ""
        packages = _files_of_module(torchrun.training_script, roots) if torchrun.module else ()
        pending, seen, length = deque([script, *packages]), set(), 0
        while pending:
            path = pending.popleft()  # the script's nearest first
            if path in seen:
                continue
            if length > _MOST:
                self.readable = False
                return
            seen.add(path)
            with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError), tokenize.open(path) as file:
                text = file.read()
                length += len(text)
                self.files.append(path)
                self.readable = self.readable or path == script
                try:
                    with warnings.catch_warnings():  # Python itself warns of a doubtful "\d" where it runs the file
                        warnings.simplefilter("ignore")
                        nodes = list(ast.walk(ast.parse(text)))
                except (SyntaxError, ValueError, RecursionError):  # another version's syntax
                    self._strings.add(text)
                    self._names.update(re.findall(r"\w+", text))
                    continue
                self._names.update(_names(nodes))
                self._strings.update(_strings(nodes))
                pending += _imported(nodes, path, roots, own_package)


def _folder_of(script: Path, torchrun: argparse.Namespace) -> Path:
    """The folder in which Python looks first for what a script imports: it follows a link to the script itself."""
    return script.parent if os.path.isdir(torchrun.training_script) else Path(os.path.realpath(script)).parent


def _roots(first: Path) -> list[str]:
    """Folders in which the script's Python looks for the user's modules: its own, then those of PYTHONPATH.

    A folder above the script's own is the user's project, also where packages were installed into it; these do not
    count, see `_packages_in`.
    """
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    own = Path(os.path.realpath(first))
    theirs = (
        path
        for path in named
        if own.is_relative_to(os.path.realpath(path)) or not _is_installed(Path(os.path.abspath(path)))
    )
    return [str(first), *theirs]


def _imported(nodes: list[ast.AST], importer: Path, roots: list[str], own_package: str) -> Iterator[Path]:
    """Files of the user's own modules that this one imports."""
    above = [importer, *Path(os.path.abspath(importer)).parents]
    for node in nodes:
        level = node.level if isinstance(node, ast.ImportFrom) else 0
        if level >= len(above):  # above the root folder is nothing to import
            continue
        places = [str(above[level])] if level else roots
        for name in _modules(node):
            if name.partition(".")[0] == "torch" and not level:
                continue
            own = level > 0 or name.partition(".")[0] == own_package
            yield from _files_of_module(name, places, also_installed=own)


def _modules(node: ast.AST) -> list[str]:
    """Dotted names of what may be modules, in an import statement."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
    return []


def _files_of_module(name: str, roots: list[str], also_installed: bool = True) -> Iterator[Path]:
    """The files that importing the dotted `name` would run, as far as they exist: each package's, then the module's."""
    first, *more = name.split(".")
    if not first:  # `-m .train`, which Python refuses
        return
    places = [
        Path(root)
        for root in roots
        if _is_module(Path(root, first)) and (also_installed or first not in _packages_in(root))
    ]
    if not places:
        places = [place for place in _where_installed(first) if also_installed or not _is_installed(place)]
    for place in places[:1]:
        path = place / first
        yield from _file_of(path)
        for part in more:
            path = path / part
            yield from _file_of(path)


def _is_module(path: Path) -> bool:
    return os.path.isdir(path) or os.path.isfile(path.with_name(f"{path.name}.py"))


def _file_of(path: Path) -> Iterator[Path]:
    found = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    yield from [file for file in found if os.path.isfile(file)][:1]


def _where_installed(name: str) -> list[Path]:
    """The folder that holds the top-level module `name` for this Python; nothing is imported."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    folders = [Path(folder).parent for folder in spec.submodule_search_locations or ()]
    return folders or ([Path(spec.origin).parent] if spec.has_location and spec.origin else [])


@functools.cache
def _packages_in(folder: str) -> frozenset[str]:
    """The names of the modules that were installed into a folder, as their distributions list them there."""
    files = (file for one in metadata.distributions(path=[folder]) for file in one.files or ())
    return frozenset(file.parts[0].removesuffix(".py") for file in files)


@functools.cache
def _is_installed(folder: Path) -> bool:
    """Whether it holds installed packages, also where `pip install --target` has put them, as on many clusters."""
    if {"site-packages", "dist-packages"} & set(folder.parts):
        return True
    if any(folder.is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib")):
        return True
    # Of a folder that this user may not look at there is nothing, where `Path.glob` would raise.
    return any(glob.iglob("*.dist-info", root_dir=folder))


def _names(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield node.arg


def _strings(nodes: list[ast.AST]) -> Iterator[str]:
    """All strings but those that only document, except where docopt makes the command line of them."""
    of_docopt = any("docopt" in name for node in nodes for name in _modules(node))
    documents = set()
    for node in nodes:  # a statement comes before what it holds
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and not of_docopt:
            documents.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documents:
            yield node.value
