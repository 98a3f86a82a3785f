"""The entry point: a command if the first word is one and no such file exists, else a training job."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from importlib import import_module

from autoddp.errors import AutoddpError

COMMANDS = ("bench", "probe", "recipe")


def main() -> None:
    """Ends the process. A user's error is one line on stderr and exit code 2; a failed job ends as under torchrun."""
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
        sys.stderr.write(f"autoddp: error: {error}\n")
        sys.exit(error.exit_code)
    if job is not None:
        run.launch(job)


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
