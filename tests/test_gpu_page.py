"""The table of docs/gpu.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = [
    line.split("|")[1:4]
    for line in (TESTS.parent / "docs" / "gpu.md").read_text(encoding="utf-8").splitlines()
    if "::" in line
]


@pytest.mark.parametrize(("what", "on_cpu", "on_gpu"), ROWS, ids=[what.strip() for what, _, _ in ROWS])
def test_each_point_has_a_test_and_a_check(what: str, on_cpu: str, on_gpu: str) -> None:
    for cell, folder in ((on_cpu, "worker"), (on_gpu, "gpu")):
        found = re.search(r"`(?:(\w+)/)?(\w+\.py)::(\w+)`", cell)
        assert found, cell
        source = (TESTS / (found[1] or folder) / found[2]).read_text(encoding="utf-8")
        assert f"def {found[3]}(" in source


def test_there_are_rows() -> None:
    assert len(ROWS) >= 20
