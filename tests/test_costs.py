"""`make test` stays within ten minutes: the record of what it costs, and its limit."""

from __future__ import annotations

from pathlib import Path

import costs
from launchers import ROOT

LIMIT = 720
"""CPU seconds of all tests, on a machine that does nothing else: beside other work they use up to 1.8 times as many,
and on the slowest machines of the usual kind twice as many. Ten minutes of two cores are 1200; the linter, types and
the starts of pytest's own processes need 100, and at times nothing runs."""


def test_the_recorded_tests_keep_the_limit() -> None:
    assert sum(cost.cpu for cost in costs.read().values()) <= LIMIT, "make `make test` cheaper, then `make costs`"


def test_every_file_of_tests_is_recorded() -> None:
    """Except for those of which `make test` runs nothing."""
    files = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    recorded = costs.read().keys()
    assert recorded <= files.keys(), "run `make costs`"
    assert [name for name in files.keys() - recorded if "whole" not in files[name]] == [], "run `make costs`"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = {"tests/a/test_b.py": costs.Cost(3, 1.5, 0.5, 1, 2, 0), "tests/a/test_a.py": costs.Cost(1, 0.5)}
    costs.write(files, 60.0, tmp_path / "record.json")
    assert costs.read(tmp_path / "record.json") == files
    assert "| tests/a | 4 | 2 | 0 | 1 | 2 | 0 |" in costs.table(files)
