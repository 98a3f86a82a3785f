"""trace.json of a real run, and what is said of it. tests/cli/test_diagnose.py has that of a diagnosis."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from test_trace import two_ranks

from autoddp.timing.timeline import Timeline
from autoddp.trace import check, order_of, trace_of, write_trace


def test_the_file_is_this_users_and_one_line_says_how_to_open_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    (line,) = write_trace(path, trace_of(two_ranks()))
    assert line == f"trace: {path} (open it in https://ui.perfetto.dev or chrome://tracing; both read the file locally)"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert check(json.loads(path.read_text())) == []


@pytest.mark.parametrize("ranks", [two_ranks(ahead=0.05), [Timeline(0, "", 0.0, 0.0, (1.0,), ())]])
def test_what_is_not_to_be_trusted_is_said(tmp_path: Path, ranks: list[Timeline]) -> None:
    _, line = write_trace(tmp_path / "trace.json", trace_of(ranks))
    assert line == f"trace: {order_of(ranks)}"


def test_a_place_that_takes_no_file_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(OSError, match=r"trace\.json"):
        write_trace(tmp_path / "trace.json", trace_of(two_ranks()))


def test_a_tuning_run_leaves_a_trace_if_asked(tuned_plain: Path) -> None:
    (path,) = tuned_plain.glob(".autoddp/2*/trace.json")
    trace = json.loads(path.read_text())
    assert check(trace) == []
    assert trace["otherData"]["reductions"] >= 1
    told = json.loads(path.with_name("summary.json").read_text())
    assert told["diagnosis"] is None
    assert len(told["timelines"]) == 2
