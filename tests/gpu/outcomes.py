"""Hooks of pytest by which `run_checks.py` learns of each check: what it needs, how it went, and its figures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """`figure("ms a step", "3.1")`: what the table shows beside the check."""
    return record_property


def pytest_collection_finish(session: pytest.Session) -> None:
    """For `run_checks.py`: the checks, the limits that some have, and which need the device alone."""
    place = os.environ.get("GPU_CHECKS")
    if place:
        checks = [of_item(item) for item in session.items if item.path.parent == HERE]
        Path(place).write_text(json.dumps(checks))


def of_item(item: pytest.Item) -> dict[str, Any]:
    """What `run_checks.Check` is made of."""
    limit = item.get_closest_marker("timeout")
    return {
        "name": _in_this_folder(item.path, item.nodeid),
        "limit": limit.args[0] if limit else 0,
        "alone": item.get_closest_marker("alone") is not None,
    }


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """For `run_checks.py`: a file that cannot be imported is a row of the table."""
    if report.failed and "GPU_CHECKS" in os.environ:
        _record(check=Path(report.nodeid).name, outcome="failed", figure=_last_line(report.longreprtext))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """For `run_checks.py`: how it went, and the figure that the check has recorded."""
    if report.when != "call" and report.passed:
        return
    if report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        outcome, figure = "skipped", why.removeprefix("Skipped: ")
    else:
        figures = ", ".join(f"{name} {value}" for name, value in report.user_properties if name != "used")
        outcome, figure = report.outcome, figures if report.passed else f"{figures} {_last_line(report.longreprtext)}"
    _record(
        check=_in_this_folder(Path(report.location[0]), report.nodeid),
        outcome=outcome,
        figure=figure.strip()[:300],
        seconds=round(report.duration, 1),
    )


def _in_this_folder(file: Path, nodeid: str) -> str:
    """The file and the name of a check: with which folder pytest's own name begins depends on the call."""
    return f"{file.name}::{nodeid.split('::', 1)[1]}"


def _last_line(text: str) -> str:
    """What went wrong, of a report: its last line that says so."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return errors[0] if errors else text.strip().rpartition("\n")[2]


def _record(**row: Any) -> None:
    place = os.environ.get("GPU_RESULTS")
    if place:
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
