"""What docs/gpu.md and the scripts of tests/gpu say is true of the tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_floors import IMPORTED_AS

TESTS = Path(__file__).parent
LISTED = (TESTS.parent / "pyproject.toml").read_text(encoding="utf-8").partition("\ndependencies = [")[2]
DEPENDENCIES = [
    name
    for line in LISTED.partition("\n]")[0].splitlines()
    if (name := re.split("[<>=]", line.strip(' "'))[0]) not in ("", "torch", "tomli")  # no GPU machine has Python 3.10
]
POINTS = (TESTS.parent / "docs" / "gpu.md").read_text(encoding="utf-8").partition("\n## Each point with")[2]
ROWS = [line.split("|")[1:4] for line in POINTS.splitlines() if "::" in line]


@pytest.mark.parametrize(("what", "on_cpu", "on_gpu"), ROWS, ids=[what.strip() for what, _, _ in ROWS])
def test_each_point_has_a_test_and_a_check(what: str, on_cpu: str, on_gpu: str) -> None:
    for cell, folder in ((on_cpu, "worker"), (on_gpu, "gpu")):
        found = re.search(r"`(?:(\w+)/)?(\w+\.py)::(\w+)`", cell)
        assert found, cell
        source = (TESTS / (found[1] or folder) / found[2]).read_text(encoding="utf-8")
        assert f"def {found[3]}(" in source


def test_there_are_rows() -> None:
    assert len(ROWS) >= 20


@pytest.mark.parametrize("name", DEPENDENCIES)
def test_a_machine_with_a_gpu_gets_what_autoddp_needs(name: str) -> None:
    """It may have torch and nothing else: tests/gpu/wheels.sh fetches the rest, carried.py looks whether it came."""
    fetched = (TESTS / "gpu" / "wheels.sh").read_text(encoding="utf-8").partition("PACKAGES=(")[2].partition(")")[0]
    looked_for = (TESTS / "gpu" / "carried.py").read_text(encoding="utf-8").partition("NEEDED = (")[2].partition(")")[0]
    assert name in [package.partition("==")[0] for package in fetched.split()]
    assert f'"{IMPORTED_AS.get(name, name)}"' in looked_for
