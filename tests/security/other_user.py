"""Another user of this machine: a function runs in a child process with that user's rights."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import TypeVar

import pytest

NOBODY = 65534
T = TypeVar("T")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def as_another_user(function: Callable[[], T]) -> T:
    """What the function returns there."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with os.fdopen(writer, "wb") as file:
                pickle.dump(function(), file)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    assert status == 0
    found: T = pickle.loads(said)
    return found
