"""The entry point: a command if the first word is one and no such file exists, else a training job."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from importlib import import_module

from autoddp.errors import AutoddpError
from autoddp.log import tell

COMMANDS = ("bench", "probe", "recipe")


def main() -> None:
    """Ends the process. A user's error is one line on stderr and exit code 2; a failed job ends as under torchrun."""
    _open_standard_streams()
    words = sys.argv[1:]
    try:
        if words and words[0] in COMMANDS and not os.path.exists(words[0]):
            sys.exit(import_module(f"autoddp.cli.{words[0]}").run(words[1:]))
        if words and words[0] == "--version":
            from autoddp.version import __version__

            print(f"autoddp {__version__}")
            sys.exit(0)
        with _nothing_collected():
            from autoddp.cli import run
            from autoddp.launch.elastic import load_torchrun

            load_torchrun()
        job = run.prepare(words)
    except AutoddpError as error:
        tell(f"error: {error}")
        sys.exit(error.exit_code)
    if job is not None:
        run.launch(job)


def _open_standard_streams() -> None:
    """Where one of the three was closed, a socket would take its place and get what is meant for the user."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)  # takes the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (open as long as the process)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Importing torch makes a million objects and no garbage: looking for some costs a tenth of the launch."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


if __name__ == "__main__":
    main()
