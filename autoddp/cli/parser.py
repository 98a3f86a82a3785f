"""The parser of the commands that take no options of torchrun."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from autoddp.errors import UsageError
from autoddp.log import show_exactly


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are UsageErrors of one line, as all other errors of a user are.

    `prog`: "autoddp", the name of the command, and any further words.
    """

    def error(self, message: str) -> NoReturn:
        """Called by argparse for words that it does not understand."""
        raise UsageError(f"{self.prog.split()[1]}: {message}; see {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        """Called by argparse for --help. Its own method ignores that the help cannot be written; OutputLost here."""
        show_exactly(self.format_help())
