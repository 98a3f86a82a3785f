"""`autoddp report A B`: what has changed from one run to another."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from page_samples import starts, summary

from autoddp.cli.report import run
from autoddp.errors import AutoddpError
from autoddp.report.comparison import Comparison, Step, compare
from autoddp.report.page_content import page_content
from autoddp.timing import Speedup


def compared(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    return compare(page_content(before), page_content(after))


def faster(by: float) -> dict[str, Any]:
    """The sample's run on a machine that is faster."""
    found = copy.deepcopy(summary())
    rounds = found["finals"]["baseline_rounds"]
    found["finals"]["baseline_rounds"] = [[second / by for second in steps] for steps in rounds]
    for one in found["ladder"]:
        one["rounds"] = [[second / by for second in steps] for steps in one["rounds"]]
    found["run"] = "20251122-200000-host-4712"
    return found


def test_a_run_against_itself() -> None:
    found = compared(summary(), summary())
    assert found.differs == ()
    for step in found.steps[:2]:
        assert step.times is not None
        assert step.times.ratio == pytest.approx(1.0)
        assert step.row()[3].startswith("no sure difference (×")
    assert "job, machine and recipe are the same, as far as the runs tell" in "\n".join(found.lines())


def test_runs_of_a_script_without_ddp() -> None:
    before, after = starts("steps"), starts("steps")
    aim = after["objective"]
    for one in (aim["rounds"]["as_written"], aim["rounds"]["finalists"][0]["numbers"]):
        one[:] = [number / 2 for number in one]
    for step in compared(before, after).steps:
        assert step.times is not None
        assert step.times.ratio == pytest.approx(2.0)
    assert [step.what for step in compared(before, after).steps] == ["as written", "as launched"]
    with pytest.raises(ValueError, match="neither of the two runs has measured a step"):
        compared(starts(), starts())


@pytest.mark.parametrize("by", [2.0, 0.5])
def test_a_step_that_has_changed(by: float) -> None:
    for step in compared(summary(), faster(by)).steps[:2]:
        assert step.times is not None
        assert step.times.ratio == pytest.approx(by)
        assert step.row()[3].startswith("×2.00 faster (" if by > 1 else "×2.00 slower (")


def test_a_launched_step_is_no_shorter_than_the_loaders_pace() -> None:
    """Rounds live on batches that wait in queues: `seconds` of the ladder, and the answer, know that."""
    limited = copy.deepcopy(summary())
    for one in limited["ladder"]:
        one["seconds"] = one["pace"] = 2 * max(second for steps in one["rounds"] for second in steps)
    launched = page_content(limited).launched
    assert launched is not None
    assert compared(limited, limited).steps[1].before == launched.seconds


def test_the_words_of_a_difference() -> None:
    assert Step("x", 0.1, 0.05, Speedup(2.0, 1.6, 2.5)).row() == ("x", "100", "50.0", "×2.00 faster (1.60 to 2.50)")
    assert Step("x", 0.05, 0.1, Speedup(0.5, 0.4, 0.8)).row()[3] == "×2.00 slower (1.25 to 2.50)"
    assert Step("x", None, 0.1).row() == ("x", "–", "100", "")


def test_causes_and_facts_that_differ() -> None:
    after = copy.deepcopy(summary())
    after["diagnosis"]["findings"][0] |= {"cause": "slow_link", "ms": 3.0}
    after["job"] |= {"torch": "2.14.0", "world_size": 4}
    after["topology"] = after["topology"].replace("eth0", "eth7")
    after["network"]["says"] = "eth7 carries the gradients"
    after["decision"]["configuration"] = {}
    found = compared(summary(), after)
    prices = {step.what: (step.before, step.after) for step in found.steps if step.is_cause}
    assert prices["straggler"] == (pytest.approx(0.009314), None)
    assert prices["slow_link"] == (None, pytest.approx(0.003))
    assert "\n  one rank is slower than the others  9.31  –" in "\n".join(found.lines())
    lines = "\n".join(found.differs)
    assert "world size: 2 → 4" in lines
    assert f"torch: {summary()['job']['torch']} → 2.14.0" in lines
    assert " → as written" in lines
    assert "network: eth1 carries the gradients: 25 Gbit/s → eth7 carries the gradients" in lines
    assert "machine A: └── eth0  physical, up\nmachine B: └── eth7  physical, up" in lines


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(json.dumps(summary()))
    Path("b.json").write_text(json.dumps(faster(2.0)))
    Path("bare.json").write_text(json.dumps({"schema": 1, "trials": []}))
    return tmp_path


def test_the_command(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["a.json", "b.json"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("A  train.py (run 20251121-200000-host-4711)\nB  train.py (run 20251122-200000-host-4712)\n")
    assert "×2.00 faster" in text
    assert max(map(len, text.splitlines())) <= 80
    assert run(["a.json", "b.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [step["what"] for step in found["steps"][:2]] == ["as written", "as launched"]
    assert sorted(path.name for path in files.iterdir()) == ["a.json", "b.json", "bare.json"]


BAD = {
    "three": (["a.json", "b.json", "a.json"], "report: 3 runs; name one, or two to compare"),
    "a page of two": (["a.json", "b.json", "--output", "x"], "report: --output is for the page of one run"),
    "one as JSON": (["a.json", "--json"], "report: --json is for two runs, which are compared"),
    "an absent one": (["a.json", "nowhere"], "report: nowhere: No such file or directory"),
    "nothing measured": (["bare.json", "bare.json"], "report: neither of the two runs has measured a step"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compared(case: str, files: Path) -> None:
    words, says = BAD[case]
    with pytest.raises(AutoddpError, match=r"^[^\n]+$") as caught:
        run(words)
    assert str(caught.value).startswith(says)
    assert caught.value.exit_code == 2
