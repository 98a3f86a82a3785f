"""The last lines of a study: what was won, why, and a command that works."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest

from autoddp.commandline.words import parse
from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.report import try_next, what_was_won
from autoddp.study.outcome import Decision, Standing
from autoddp.timing import Block, speedup
from autoddp.units import milliseconds

BEFORE, AFTER = [0.0180, 0.0182, 0.0181], [0.0100, 0.0101, 0.0102]


def outcome(configuration: Configuration, further: Rung | None = None) -> SimpleNamespace:
    """What the two functions read of an outcome."""
    blocks = tuple(Block((seconds,)) for seconds in AFTER)
    ladder = [Standing(configuration, 0.0101, speedup(BEFORE, AFTER), blocks)] if configuration else []
    return SimpleNamespace(
        ladder=ladder,
        decision=Decision(configuration, "", further),
        before=lambda _standing: 0.0181,
        figure=milliseconds,
        unit="ms per step",
    )


def test_what_was_won_and_what_each_setting_does() -> None:
    gain, *settings = what_was_won(outcome(Configuration({"defer_reductions": 6, "bucket_cap_mb_list": [5.0, 1.0]})))
    assert gain == "won: 10.1 ms per step in place of 18.1 (×1.79), because of"
    assert len(settings) == 2
    assert settings[0].startswith("  bucket_cap_mb_list=[5.0, 1.0]: MiB of each bucket")
    assert settings[1].startswith("  defer_reductions=6: backward passes of a step, of which only the last one reduces")


def test_nothing_won_is_no_line() -> None:
    assert what_was_won(outcome(AS_WRITTEN)) == []


@pytest.mark.parametrize("words", [["--nproc-per-node", "2", "a b/train.py", "--lr", "3"], ["-m", "package.train"]])
def test_the_next_command_is_the_same_job_with_another_rung(words: list[str]) -> None:
    said = try_next(outcome(AS_WRITTEN, Rung.LOSSY), "my recipe.toml", words)
    command = shlex.split(said.removeprefix("try next: "), comments=True)
    request = parse(command[1:])
    assert (command[0], request.allow, str(request.recipe)) == ("autoddp", Rung.LOSSY, "my recipe.toml")
    assert request.script == next(word for word in words if "train" in word)


def test_without_another_rung_it_prints_the_ladder() -> None:
    assert try_next(outcome(AS_WRITTEN), "r.toml", []).startswith("try next: autoddp recipe show r.toml ")
    assert "the same commands with --recipe r.toml --allow near" in try_next(
        outcome(AS_WRITTEN, Rung.NEAR), "r.toml", []
    )
