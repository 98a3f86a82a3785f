"""The parser of the commands that take no options of torchrun."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from autoddp.errors import UsageError, did_you_mean
from autoddp.log import show_exactly


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are UsageErrors of one line, as all other errors of a user are.

    `prog`: "autoddp", the name of the command, and any further words.
    """

    def error(self, message: str) -> NoReturn:
        """Called by argparse for words that it does not understand."""
        _, _, words = message.partition("unrecognized arguments: ")
        unknown = next((word.partition("=")[0] for word in words.split() if word.startswith("-")), "")
        known = self._known()  # another word may have it
        meant = did_you_mean(unknown, known) if unknown and unknown not in known else ""
        raise UsageError(f"{self.prog.split()[1]}: {message}{meant}; see {self.prog} --help")

    def _known(self) -> list[str]:
        """Every option, also those of words such as `check`: their parsers leave unknown words to this one."""
        below = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        parsers = [self, *(parser for choices in below for parser in choices.values())]
        return [option for parser in parsers for option in parser._option_string_actions]

    def print_help(self, file: Any = None) -> None:
        """Called by argparse for --help. Its own method ignores that the help cannot be written; OutputLost here."""
        show_exactly(self.format_help())
