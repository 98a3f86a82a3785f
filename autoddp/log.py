"""The project's one logger: silent unless asked, the root logger untouched.

AUTODDP_LOG=debug autoddp train.py      # autoddp's own steps on stderr
"""

from __future__ import annotations

import logging
import os

_NAME = "autoddp"


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
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[autoddp %(asctime)s %(levelname)s %(name)s] %(message)s"))
    logging.getLogger(_NAME).setLevel(level)
    return handler
