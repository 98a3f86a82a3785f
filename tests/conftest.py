"""Fixtures for all tests."""

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest
from lab import Lab, unavailable
from launchers import FROM_NOTHING

LONG_FIRST = ("faults", "equality", "traces", "compat", "launch", "recipes", "worker", "cli", "isolation")
"""Folders of tests by how long their longest file takes; the others' files take seconds."""


@pytest.fixture
def lab() -> Iterator[Callable[..., Lab]]:
    """Builds labs, `lab(hosts=2, rate="200mbit")`, and takes them down; skips where there can be none."""
    if reason := unavailable():
        pytest.skip(f"no lab: {reason}")
    with contextlib.ExitStack() as open_labs:
        yield lambda **options: open_labs.enter_context(Lab(**options))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="also what is marked whole: the long matrices, not sampled")


def pytest_configure(config: pytest.Config) -> None:
    """A fork is not quite a start: `make test-whole` has the real ones."""
    if config.getoption("--whole"):
        os.environ[FROM_NOTHING] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long go first: one that began last would run on when nothing is left to run beside it."""
    items.sort(key=lambda item: LONG_FIRST.index(item.path.parent.name) if item.path.parent.name in LONG_FIRST else 99)
    if not config.getoption("--whole"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("whole")])
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
