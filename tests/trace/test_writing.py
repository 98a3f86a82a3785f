"""trace.json of a real run, and what is said of it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from launchers import AUTODDP, SCRIPTS, start
from test_trace import named, two_ranks

from autoddp.timing.timeline import Timeline
from autoddp.trace import check, order_of, write_trace


def test_the_file_is_this_users_and_one_line_says_how_to_open_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    (line,) = write_trace(path, two_ranks())
    assert line == f"trace: {path} (open it in https://ui.perfetto.dev or chrome://tracing; both read the file locally)"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert check(json.loads(path.read_text())) == []


@pytest.mark.parametrize("ranks", [two_ranks(ahead=0.05), [Timeline(0, "", 0.0, 0.0, (1.0,), ())]])
def test_what_is_not_to_be_trusted_is_said(tmp_path: Path, ranks: list[Timeline]) -> None:
    _, line = write_trace(tmp_path / "trace.json", ranks)
    assert line == f"trace: {order_of(ranks)}"


def test_a_place_that_takes_no_file_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(OSError, match=r"trace\.json"):
        write_trace(tmp_path / "trace.json", two_ranks())


def test_a_diagnosis_leaves_a_trace_of_all_ranks(tmp_path: Path) -> None:
    words = [
        "--json",
        "--nproc-per-node",
        "2",
        "--diagnose-budget",
        "4s",
        str(SCRIPTS / "slow_loader.py"),
        "--slow",
        "1",
    ]
    done = start((*AUTODDP, "diagnose"), tmp_path, words, {}).wait()
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob(".autoddp/2*/trace.json")
    assert f"trace: {path} (open it in" in done.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    trace = json.loads(path.read_text())
    assert check(trace) == []
    assert [e["args"]["name"].split(" on ")[0] for e in named(trace, "M", "process_name")] == ["rank 0", "rank 1"]
    told = trace["otherData"]
    assert (told["contradictions"], told["clock_error_ms"]) == (0, {"rank 0": 0.0, "rank 1": 0.0})
    assert told["reductions"] >= 5
    stages = {e["name"] for e in named(trace, "X") if e["cat"] == "stages"}
    assert {"data", "forward", "backward", "exposed", "optimizer"} <= stages
    waits = named(trace, "X", "waits for rank 1")
    assert waits
    assert {e["pid"] for e in waits} == {1}, "rank 0 waits for rank 1, whose loader is slow"
    (summary,) = tmp_path.glob(".autoddp/2*/summary.json")
    assert len(json.loads(summary.read_text())["timelines"]) == 2


def test_a_tuning_run_leaves_a_trace_if_asked(tuned_plain: Path) -> None:
    (path,) = tuned_plain.glob(".autoddp/2*/trace.json")
    trace = json.loads(path.read_text())
    assert check(trace) == []
    assert trace["otherData"]["reductions"] >= 1
    told = json.loads(path.with_name("summary.json").read_text())
    assert told["diagnosis"] is None
    assert len(told["timelines"]) == 2
