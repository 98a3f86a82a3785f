"""The runner of the GPU checks leaves no check out, whatever the one before it does to its process."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import run_checks
from outcomes import of_item
from run_checks import Check, Runner, outcomes, part_of, table, units_of

CHECKS = """
import os
import pytest

pytestmark = pytest.mark.gpu

def test_first(figure):
    figure("ms", 3)

def test_crashes():
    os.abort()

def test_fails():
    assert "this" == "that"
"""


def test_every_check_has_an_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, folder = tmp_path / "gpu_checks.jsonl", tmp_path / "checks"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("outcomes.py"), folder / "conftest.py")
    (folder / "test_these.py").write_text(CHECKS)
    (folder / "test_broken.py").write_text("import nothing_of_that_name\n")
    checks = run_checks.collected([], results, folder)
    runner = Runner(results, folder)
    for thread in runner.run(units_of(checks), 2):
        thread.join()
    found = {name: row["outcome"] for name, row in outcomes(results).items()}
    assert found == {
        "test_broken.py": "failed",
        "test_these.py::test_first": "passed",
        "test_these.py::test_crashes": "ended",
        "test_these.py::test_fails": "failed",
    }
    assert not table(results, checks)
    printed = capsys.readouterr().out
    assert "nothing_of_that_name" in printed
    assert "ms 3" in printed


def test_what_was_not_run_stands_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not table(tmp_path / "none", [Check("test_gpu_x.py::test_y", 0, False)])
    assert "test_gpu_x.py::test_y  not run" in capsys.readouterr().out


def test_parts_hold_each_check_once() -> None:
    checks = [Check(f"test_{n % 4}.py::test_{n}", 100 * (n % 3), False) for n in range(20)]
    units = units_of(checks)
    parts = [part_of(units, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(check.name for part in parts for unit in part for check in unit) == sorted(c.name for c in checks)
    loads = [sum(check.seconds for unit in part for check in unit) for part in parts]
    assert max(loads) - min(loads) <= 200


def test_the_page_lists_each_check_with_its_part(request: pytest.FixtureRequest) -> None:
    page = (run_checks.ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").partition("\n## Each point with")[0]
    listed = dict(re.findall(r"^\| `(\S+::.+?)` \| (\d) \|", page, re.MULTILINE))
    items = [item for item in request.session.items if item.path.parent == run_checks.HERE]
    if {item.path for item in items} < set(run_checks.HERE.glob("test_*.py")):
        pytest.skip("needs all of tests/gpu to be collected")
    if request.config.getoption("--shuffle") is not None:
        pytest.skip("parts go by the checks' order")
    units = units_of([Check(**of_item(item)) for item in items if item.get_closest_marker("gpu")])
    of_parts = {part: part_of(units, f"{part}/3") for part in "123"}
    assert listed == {check.name: part for part, units in of_parts.items() for unit in units for check in unit}
