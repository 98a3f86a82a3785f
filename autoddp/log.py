"""What autoddp says: lines for the user, and a logger that is silent unless asked. The root logger is untouched.

AUTODDP_LOG=debug autoddp train.py      # autoddp's own steps on stderr

A terminal that is gone, a full disk behind a redirection or a closed descriptor never stops anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

_NAME = "autoddp"


class UnfailingStderr:
    """Standard error as a file to which writing never fails; what cannot be written is lost."""

    @property
    def encoding(self) -> str:
        """As a text file's."""
        return getattr(sys.stderr, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """As a text file's."""
        # ValueError: the script, or a test, has closed it. None: there was none at the start.
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:
                sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """As a text file's."""
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:
                sys.stderr.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        with contextlib.suppress(OSError, ValueError):
            return sys.stderr is not None and sys.stderr.isatty()
        return False

    def fileno(self) -> int:
        """Its descriptor; OSError if it has none."""
        if sys.stderr is None:
            raise OSError("there is no standard error")
        return sys.stderr.fileno()


def tell(text: str) -> None:
    """One line for the user."""
    stderr = UnfailingStderr()
    stderr.write(f"autoddp: {printable(text)}\n")
    stderr.flush()


def printable(text: str) -> str:
    """`text` on one line: the name of a file may hold line breaks and escape sequences, which are shown as escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def get_logger(name: str) -> logging.Logger:
    """A child of the `autoddp` logger; `name` is the module's `__name__`."""
    logger = logging.getLogger(_NAME)
    if not logger.handlers:
        logger.addHandler(_handler())
        logger.propagate = False
    return logging.getLogger(name)


def _handler() -> logging.Handler:
    level = os.environ.get("AUTODDP_LOG", "").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        return logging.NullHandler()
    handler = logging.StreamHandler(UnfailingStderr())
    handler.setFormatter(logging.Formatter("[autoddp %(asctime)s %(levelname)s %(name)s] %(message)s"))
    logging.getLogger(_NAME).setLevel(level)
    return handler
