"""The answer of a study, as it stands in a file or on a terminal without colour: a picture of each outcome."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from autoddp.diagnose import Diagnosis, Finding
from autoddp.diagnose.findings import Scaling
from autoddp.knobs import AS_WRITTEN, BY_NAME, Configuration, GradientError, Rung, Value
from autoddp.log import WIDTH
from autoddp.report import Terminal, Ways, answer
from autoddp.study import Decision, Outcome, Standing, TrialRecord
from autoddp.timing import Block, speedup
from autoddp.wire import JobFacts

FACTS = JobFacts(
    world_size=2,
    nodes=1,
    backend="gloo",
    devices=("cpu",),
    torch="2.13.0",
    gradient_bytes=14 * 2**20,
    parameters_digest="0123456789abcdef",
    ddp_arguments={},
    knobs=(),
)
ROUNDS = [0.177, 0.179, 0.175]
WAYS = Ways(
    recipe="digits.train.autoddp.toml",
    next_start="autoddp train.py",
    report=".autoddp/20261126-033334-vm-14540/report.html",
    undo="torchrun --nproc-per-node 2 train.py",
)


def standing(values: dict[str, Value], times: float, error: GradientError | None = None) -> Standing:
    seconds = [one / times * (1 + 0.01 * (-1) ** number) for number, one in enumerate(ROUNDS)]
    blocks = tuple(Block((second,)) for second in seconds)
    return Standing(Configuration(values), seconds[0], speedup(ROUNDS, seconds), blocks, error)


def finding(cause: str, seconds: float, status: str, fix: str) -> Finding:
    return Finding(cause, (0, 1), seconds, None, None, status, "what was seen", fix)  # type: ignore[arg-type]


def diagnosis(*findings: Finding) -> Diagnosis:
    return Diagnosis(0.171, (), findings, (), Scaling(2, None, None, 0.5, ""), (), ())


def outcome(*ladder: Standing, decision: Decision, found: Diagnosis | None = None, ended: str = "") -> Outcome:
    rounds = tuple(Block((second,)) for second in ROUNDS)
    return Outcome(
        facts=FACTS,
        baseline=TrialRecord(0, AS_WRITTEN, "measured", rounds),
        headroom=0.5,
        headroom_block=Block((0.05,)),
        trials=(),
        baseline_rounds=rounds if ladder else (),
        finalists=ladder,
        ladder=ladder,
        decision=decision,
        diagnosis=found,
        ended=ended,
    )


def shown(of: Outcome, configuration: Configuration, tmp_path: Path, ways: Ways = WAYS) -> str:
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        Terminal(lambda _: True, tmp_path / "tuning.log").answer(answer(of, configuration, ways))
    return text.getvalue()


ERROR = GradientError(4, 0.0024, 0.999, 0.0024, "0.weight", 0.0024, True, 0.0024, "0.weight")
EXACT = {"defer_reductions": 6, "gradient_as_bucket_view": True}
LOSSY = {"bucket_cap_mb": 32.0, "hook": "powersgd", "powersgd_rank": 1}


def test_a_gain(tmp_path: Path) -> None:
    best = standing(EXACT, 1.52)
    of = outcome(
        best,
        decision=Decision(best.configuration, "the best of what you allow"),
        found=diagnosis(
            finding("exposed_communication", 0.102, "proved", "tune the job with autoddp"),
            finding("threads_oversubscribed", 0.015, "suspected", "fewer threads"),
        ),
    )
    assert shown(of, best.configuration, tmp_path) == dedent("""
        ×1.52 faster    177 → 118 ms per step (99 % interval: ×1.42 to ×1.62)
          by            gradients kept in their buckets; one reduction for 6 backward
                        passes
          training      nothing but the order of additions (exact)
        slow because    waiting for gradients: 102 of 171 ms (proved)
          mend          tune the job with autoddp
          perhaps       more threads than cores: up to 15.0 of 171 ms (not proved)
        saved           digits.train.autoddp.toml, used by the next autoddp train.py
        in your code    autoddp recipe code digits.train.autoddp.toml prints the lines
        report          .autoddp/20261126-033334-vm-14540/report.html
        undo            torchrun --nproc-per-node 2 train.py

        """)


def test_the_figures_of_a_gain_are_of_its_own_rounds(tmp_path: Path) -> None:
    """Of a contender that has left the rounds early: 177 ms became 500 for the script as written later on."""
    best = standing(EXACT, 1.52)
    of = outcome(best, decision=Decision(best.configuration, "the best of what you allow"))
    of = replace(of, baseline_rounds=(*of.baseline_rounds, *(Block((0.5,)),) * 4))
    assert "×1.52 faster    177 → 118 ms per step" in shown(of, best.configuration, tmp_path)


def test_a_gain_that_changes_training_and_one_that_is_not_allowed(tmp_path: Path) -> None:
    near, lossy = standing({"hook": "bf16"}, 1.9, ERROR), standing(LOSSY, 20.0, ERROR)
    of = outcome(near, lossy, decision=Decision(near.configuration, "the best of what you allow", Rung.LOSSY))
    text = shown(of, near.configuration, tmp_path)
    assert "×1.89 faster    177 → 94.1 ms per step" in text
    assert "  training      gradients travel in 16 bits (near); gradients are off by 0.24 %" in text
    assert "more            --allow lossy would give ×" in text


def test_a_hook_that_begins_later_says_so(tmp_path: Path) -> None:
    lossy = standing(LOSSY, 20.0, ERROR)
    of = outcome(lossy, decision=Decision(lossy.configuration, "the best of what you allow"))
    text = " ".join(shown(of, lossy.configuration.with_values(powersgd_start_step=1000), tmp_path).split())
    assert "after 1000 exact reductions" in text
    assert "only after 1000 reductions" in text
    assert "--job-steps" not in text


@pytest.mark.parametrize(("steps", "is_told"), [(300, True), (1000, True), (1001, False)])
def test_a_hook_that_begins_after_the_end_of_the_script_says_so(steps: int, is_told: bool, tmp_path: Path) -> None:
    lossy = standing(LOSSY, 20.0, ERROR)
    of = replace(outcome(lossy, decision=Decision(lossy.configuration, "the best of what you allow")), length=steps)
    text = " ".join(shown(of, lossy.configuration.with_values(powersgd_start_step=1000), tmp_path).split())
    assert (f"your script has only {steps} steps: --job-steps {steps} lets it begin earlier" in text) is is_told


def test_no_gain(tmp_path: Path) -> None:
    why = "no significant gain within what you allow (near): your settings stay; headroom 50 % (45 % to 55 %)"
    of = outcome(standing(EXACT, 1.0), decision=Decision(AS_WRITTEN, why))
    assert shown(of, AS_WRITTEN, tmp_path) == dedent("""
        no gain         your settings stay: 177 ms per step
          because       no significant gain within what you allow (near); headroom 50 %
                        (45 % to 55 %)
        saved           digits.train.autoddp.toml, used by the next autoddp train.py
        report          .autoddp/20261126-033334-vm-14540/report.html

        """)


@pytest.mark.parametrize(("values", "is_told"), [(EXACT, True), ({"threads": 2}, False)])
def test_loaders_that_are_slower_than_a_usual_step(values: dict[str, Value], is_told: bool, tmp_path: Path) -> None:
    """With four workers one step of four waits, so the median is below the pace. Other threads may starve them."""
    limited = replace(standing(values, 1.0), seconds=0.25, pace=0.25)
    of = outcome(limited, decision=Decision(AS_WRITTEN, "no significant gain: your settings stay"))
    assert ("your data loaders need 250 ms per step" in shown(of, AS_WRITTEN, tmp_path)) is is_told


def test_undecided(tmp_path: Path) -> None:
    why = (
        "undecided: near gives ×1.4 (0.93 to 2.12) in 3 final rounds, too few to be sure: your settings stay; your job "
        "has 96 steps, and --budget 2m would decide it"
    )
    of = outcome(standing(EXACT, 1.0), decision=Decision(AS_WRITTEN, why, is_open=True))
    assert shown(of, AS_WRITTEN, tmp_path, Ways(report=WAYS.report)) == dedent("""
        undecided       your settings stay: 177 ms per step
          because       near gives ×1.4 (0.93 to 2.12) in 3 final rounds, too few to be
                        sure; your job has 96 steps, and --budget 2m would decide it
        report          .autoddp/20261126-033334-vm-14540/report.html

        """)


def test_several_hosts(tmp_path: Path) -> None:
    best = standing(EXACT, 1.52)
    ways = Ways("train.autoddp.toml", "start with the same commands", WAYS.report, "the same commands with --trials 0")
    text = shown(outcome(best, decision=Decision(best.configuration, "")), best.configuration, tmp_path, ways)
    assert "saved           train.autoddp.toml, used by the next start with the same" in text
    assert "undo            the same commands with --trials 0" in text


def test_no_line_is_wider_than_a_terminal(tmp_path: Path) -> None:
    """But for a word that is longer than that, such as a path: whoever copies it gets it whole."""
    long = "a-folder/" * 12 + "train.py"
    best = standing({**LOSSY, **EXACT, "static_graph": True, "threads": 4, "batched_grad_copy": True}, 3.0, ERROR)
    causes = (
        finding("slow_link", 0.1, "proved", "words " * 40),
        finding("data_loader", 0.1, "suspected", "more " * 40),
    )
    ways = Ways(long, "autoddp train.py", long, f"torchrun {long} " + "--option value " * 20)
    decision = Decision(best.configuration, "because " * 30)
    text = shown(outcome(best, decision=decision, found=diagnosis(*causes)), best.configuration, tmp_path, ways)
    wide = [line for line in text.splitlines() if len(line) > WIDTH]
    assert all(long in line for line in wide)
    assert (tmp_path / "tuning.log").read_text().strip() == text.strip()


@pytest.mark.parametrize("name", BY_NAME)
def test_each_setting_is_told_in_words(name: str) -> None:
    """No name of a setting stands in the answer: where there are no words for it, the variable does."""
    knob = BY_NAME[name]
    values: dict[str, Value] = {
        "bucket_cap_mb_list": (4.0, 2.0, 1.0),
        "bucket_cap_mb": 8.0,
        "hook": "bf16",
        "threads": 2,
        "cuda_graphs": "model",
        "powersgd_factors": "bf16",
        "defer_reductions": 4,
        "accumulate_steps": 4,
    }
    words = knob.in_words(values.get(name, 1))
    assert words
    assert name not in words or name == "threads"


def test_names_of_files_have_no_effect_on_a_terminal(tmp_path: Path) -> None:
    best = standing(EXACT, 1.52)
    hostile = "a\x1b[2J\x9b31m\u202e\nfake"
    of = outcome(best, decision=Decision(best.configuration, hostile))
    text = shown(of, best.configuration, tmp_path, Ways(hostile, hostile, hostile, hostile))
    assert not any(letter in text for letter in "\x1b\x9b\u202e")
    assert "\nfake" not in text
    assert "\x1b" not in (tmp_path / "tuning.log").read_text()


def test_a_long_fix_is_cut(tmp_path: Path) -> None:
    """The report has all of it: the answer stays on one screen."""
    best = standing(EXACT, 1.52)
    found = diagnosis(finding("slow_link", 0.1, "proved", "look at the link " * 40))
    text = shown(outcome(best, decision=Decision(best.configuration, ""), found=found), best.configuration, tmp_path)
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("  mend"))
    assert lines[at + 2].endswith(" …")
    assert lines[at + 3].startswith("saved")
    assert max(map(len, lines)) <= WIDTH
