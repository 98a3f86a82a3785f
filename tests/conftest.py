"""Fixtures for all tests."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from lab import Lab, unavailable


@pytest.fixture
def lab() -> Iterator[Callable[..., Lab]]:
    """Builds labs, `lab(hosts=2, rate="200mbit")`, and takes them down; skips where there can be none."""
    if reason := unavailable():
        pytest.skip(f"no lab: {reason}")
    with contextlib.ExitStack() as open_labs:
        yield lambda **options: open_labs.enter_context(Lab(**options))
