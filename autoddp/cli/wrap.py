"""`autoddp wrap [autoddp's options] COMMAND …`: run a command in which each torchrun is autoddp.

    autoddp wrap --trials 20 accelerate launch --num_processes 8 train.py
    autoddp wrap diagnose accelerate launch --num_processes 8 train.py
    eval "$(autoddp wrap --trials 20)"          # the same for all that this shell starts from now on

For programs that call torchrun themselves. `accelerate launch`, `fabric run` and `tune run` call its function `run` or
`main` in their own process; scripts start `torchrun` or `python -m torch.distributed.run`. All of these import the
module `torch.distributed.run`, which is replaced there.

Two variables bring this into each Python process that the command starts: AUTODDP_WRAP has autoddp's options, and
PYTHONPATH begins with the folder of a `sitecustomize`. Where torchrun is found both are taken away again, so that the
job's processes have the environment that torchrun would give them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

from autoddp.commandline.parsers import own_parser
from autoddp.commandline.words import leading_own, parse_apart
from autoddp.errors import UsageError
from autoddp.log import show_exactly, tell
from autoddp.wire.worker_config import INJECT, require_injection

VARIABLE = "AUTODDP_WRAP"
"""`inject/sitecustomize.py` spells this name again: it imports nothing."""
_TORCHRUN = "torch.distributed.run"
_DIAGNOSE, _JSON = "diagnose", "--json"
_HELP = """\
usage: autoddp wrap [options] COMMAND [its arguments]
       autoddp wrap diagnose [--json] [options] COMMAND [its arguments]
       eval "$(autoddp wrap [options])"

Run a command that starts torchrun itself, for example `accelerate launch`. Each
torchrun in it becomes autoddp with the options given here, and says so in one
line. torchrun's own options stand in the command.

After the word diagnose, each torchrun becomes `autoddp diagnose`; a program of
that name stands after a `--`. Without a command: print the lines by which a
shell does the same for all that it starts.

Two variables of the environment carry this. What is started without them keeps
its torchrun: after `env -i` or `sudo`, on other machines, and in a Python that
ignores PYTHONPATH (-E, -I). Write `autoddp wrap` after such a word:
`env -i PATH="$PATH" autoddp wrap torchrun train.py`.
"""


def run(arguments: list[str]) -> int:
    """The exit code of `autoddp wrap` with these arguments; with a command it does not return."""
    if arguments[:1] in (["-h"], ["--help"]):
        show_exactly(_HELP + "\n" + own_parser().format_help().partition("\n\n")[2])
        return 0
    ours, command = _divided(arguments)
    require_injection()
    leave()  # where one `autoddp wrap` stands inside another one, the inner one counts
    theirs = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(INJECT), *([] if theirs is None else [theirs])])
    variables = {VARIABLE: shlex.join(ours), "PYTHONPATH": path}
    if not command:
        show_exactly("".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()))
        return 0
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"wrap {command[0]}: {_why_not(command[0])}")
    try:
        os.execve(program, command, {**os.environ, **variables})
    except OSError as error:
        raise UsageError(f"wrap {command[0]}: cannot be started ({error.strerror})") from None


def _why_not(name: str) -> str:
    """Why there is no command of that name, and what to do."""
    if not os.path.isfile(name):
        return "no such command; check its name, and PATH"
    if name.endswith(".py"):
        return "a script, and wrap takes a command that starts torchrun itself: leave out the word wrap"
    if os.path.dirname(name):
        return f"may not be executed: chmod +x {name}"
    return f"not along PATH, where commands are looked for: write ./{name}"


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for autoddp in each torchrun's place, and the command; UsageError for a word that is neither."""
    if list(arguments[:1]) != [_DIAGNOSE]:
        return leading_own(arguments)
    ours, rest = [_DIAGNOSE], list(arguments[1:])
    while True:
        at = rest.index(_JSON) if _JSON in rest else len(rest)
        own, command = leading_own(rest[:at])
        ours += own
        if command or at == len(rest) or rest[at - 1 : at] == ["--"]:
            return ours, [*command, *rest[at:]]
        ours.append(_JSON)
        rest = rest[at + 1 :]


def leave() -> None:
    """Take the two variables away, where they are set."""
    if os.environ.pop(VARIABLE, None) is None:
        return
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [entry for entry in path if entry != str(INJECT)]
    if rest:  # an empty one is what was set before
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)


def replace_torchrun(options: str) -> None:
    """Called by `inject/sitecustomize.py` at the first import of `torch.distributed.run`, which becomes autoddp."""
    if VARIABLE in os.environ:  # autoddp itself imports torchrun too, but has taken the variable away before
        sys.meta_path.insert(0, _Replacing(options))


class _Replacing:
    """A finder that gives torchrun's module a loader of ours."""

    def __init__(self, options: str) -> None:
        self._options = options
        self._asks = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Called by the import system, and by programs that only look whether there is such a module."""
        if name != _TORCHRUN or self._asks or VARIABLE not in os.environ:
            return None
        self._asks = True
        try:
            spec = find_spec(name)
        finally:
            self._asks = False
        if spec is not None:
            loader: Any = _Loader(spec.loader, self._options)  # it has all that the import system asks for
            spec.loader = loader
        return spec


class _Loader:
    """Loads a module by another loader, then replaces `main` and `run` in it."""

    def __init__(self, loader: Any, options: str) -> None:
        self._loader = loader
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Called by an import."""
        self._loader.exec_module(module)
        real = {name: getattr(module, name) for name in ("main", "run")}

        def autoddp(torchrun: Sequence[str] | argparse.Namespace) -> None:
            vars(module).update(real)  # autoddp launches the job by them
            try:
                run_in_place_of_torchrun(self._options, torchrun)
            finally:
                vars(module).update(ours)  # the program may start another job

        def main(args: Sequence[str] | None = None) -> None:
            autoddp(sys.argv[1:] if args is None else args)

        def run(args: argparse.Namespace) -> None:
            autoddp(args)

        ours = {"main": main, "run": run}
        vars(module).update(ours)

    def get_code(self, name: str) -> CodeType:
        """Called by `python -m`."""
        program = f"import {__name__}, sys\n{__name__}.run_in_place_of_torchrun({self._options!r}, sys.argv[1:])"
        return compile(program, name, "exec")


def run_in_place_of_torchrun(options: str, torchrun: Sequence[str] | argparse.Namespace) -> None:
    """autoddp with these options, and with what torchrun was called with. It ends as torchrun would."""
    from autoddp.cli.main import errors_end_the_process, run

    def words() -> list[str]:
        tell(f"runs in place of torchrun: autoddp wrap {options}".rstrip())
        try:
            return shlex.split(options)
        except ValueError as error:
            raise UsageError(f"{VARIABLE}={options}: {error}; set it by autoddp wrap") from None

    before = {name: os.environ[name] for name in (VARIABLE, "PYTHONPATH") if name in os.environ}
    leave()
    try:
        if options.split(None, 1)[:1] == [_DIAGNOSE]:
            from autoddp.cli.diagnose import examine
            from autoddp.torchrun.options import load_torchrun

            with errors_end_the_process():
                ours = words()[1:]
                load_torchrun()
                examine(parse_apart([word for word in ours if word != _JSON], torchrun), _JSON in ours)
        else:
            run(lambda: parse_apart(words(), torchrun))
    finally:
        os.environ.update(before)
