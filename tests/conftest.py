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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start whole jobs go first: one that began last would run on when nothing is left to run beside it."""
    items.sort(key=lambda item: "launch" not in item.path.parts)
