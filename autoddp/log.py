"""Output of autoddp: lines for the user, and a logger that is silent by default. The root logger is not changed.

AUTODDP_LOG=debug autoddp train.py      # logs what autoddp does to stderr

What is told on stderr never raises: a closed terminal, a full disk behind a redirection or a closed descriptor stops
nothing. What a command was asked for, and cannot be written to stdout, is `OutputLost`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import textwrap
import time
from typing import Any

WIDTH = 80
"""Columns of a terminal, for what a run prints."""
_NAME = "autoddp"
_NAMED = f"{_NAME}: "
"""What stands before each line for the user."""


class OutputLost(OSError):
    """Standard output takes nothing more; BrokenPipeError's number where its reader has gone."""


class UnfailingStderr:
    """Standard error as a file object whose methods do not fail; text that cannot be written is lost."""

    @property
    def encoding(self) -> str:
        """The encoding of standard error, or UTF-8 without one."""
        return getattr(sys.stderr, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write `text`, as a text file's `write`; errors are ignored."""
        # None: the process was started without it. A script may have closed it, or put an object of its own in its
        # place, which may lack any method and raise any error.
        with contextlib.suppress(Exception):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush standard error; errors are ignored."""
        with contextlib.suppress(Exception):
            sys.stderr.flush()

    def isatty(self) -> bool:
        """Whether standard error is a terminal."""
        with contextlib.suppress(Exception):
            return sys.stderr.isatty()
        return False

    def fileno(self) -> int:
        """The file descriptor of standard error; OSError if there is none."""
        if sys.stderr is None:
            raise OSError("there is no standard error")
        return sys.stderr.fileno()


_CLEAR_LINE = "\r\x1b[K"
_is_in_a_drawing = False


def cursor_is_in_a_drawing(it_is: bool) -> None:
    """Say whether a bar or a spinner is in the terminal's present line: `tell` then writes its line in that place."""
    global _is_in_a_drawing
    _is_in_a_drawing = it_is


_last_line = time.monotonic()


def line_is_shown() -> None:
    """A line for the user is being printed, here or by a console of rich's."""
    global _last_line
    _last_line = time.monotonic()


def seconds_since_a_line() -> float:
    """Since the last line for the user, or since the start."""
    return time.monotonic() - _last_line


def tell(text: str) -> None:
    """Print one line for the user to stderr, after `autoddp: `."""
    _tell(printable(text))


def tell_wrapped(text: str) -> None:
    """Print a sentence for the user to stderr, as lines that fit a terminal, of which each begins with `autoddp: `."""
    first, *others = wrapped(text, WIDTH - len(_NAMED) - 2)
    _tell(first, *(f"  {line}" for line in others))


def _tell(*lines: str) -> None:
    line_is_shown()
    stderr = UnfailingStderr()
    # In one piece: several launchers may write to one file.
    stderr.write((_CLEAR_LINE if _is_in_a_drawing else "") + "".join(f"{_NAMED}{line}\n" for line in lines))
    stderr.flush()


def wrapped(text: str, columns: int, most: int | None = None) -> list[str]:
    """`text`, made `printable`, as one or more lines of at most `columns`; a word that is longer stays whole.

    `most`: the number of lines that are kept.
    """
    wrapper = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
    wrapper.max_lines, wrapper.placeholder = most, " …"
    return wrapper.wrap(printable(text)) or [""]


def printable(text: str) -> str:
    """`text` on one line. Line breaks and escape sequences, as in names of files, are shown as Python escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def printable_lines(text: str) -> str:
    """`text` of several lines, each made `printable`: its line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


def show(text: str) -> None:
    """Print what the user has asked for to stdout, as `printable_lines`; its encoding need not have all characters.

    OutputLost where it cannot be written.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    show_exactly(printable_lines(text).encode(encoding, "backslashreplace").decode(encoding))


def show_json(document: Any) -> None:
    """Print a document of plain values to stdout, for a program that reads it. OutputLost as for `show`."""
    show_exactly(json.dumps(document))


def show_exactly(text: str) -> None:
    """Print a text of ours to stdout without any change, for example a help page. OutputLost as for `show`."""
    try:
        # A word of the user's, as a file's name, need not be UTF-8: it goes out as the bytes that came in.
        getattr(sys.stdout, "reconfigure", lambda **_: None)(errors="surrogateescape")
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
    except OSError as error:
        raise OutputLost(error.errno, error.strerror) from None


def get_logger(name: str) -> logging.Logger:
    """The logger `name`, a child of the `autoddp` logger; `name` is the module's `__name__`."""
    logger = logging.getLogger(_NAME)
    if not logger.handlers:
        logger.addHandler(_handler())
        logger.propagate = False
    return logging.getLogger(name)


class _Formatter(logging.Formatter):
    """Makes each message safe for a terminal: names and texts of others are part of what is logged."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def _handler() -> logging.Handler:
    level = os.environ.get("AUTODDP_LOG", "").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        return logging.NullHandler()
    handler = logging.StreamHandler(UnfailingStderr())
    handler.setFormatter(_Formatter("[autoddp %(asctime)s %(levelname)s %(name)s] %(message)s"))
    logging.getLogger(_NAME).setLevel(level)
    return handler
