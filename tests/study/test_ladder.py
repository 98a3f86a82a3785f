"""What is launched: exact if it surely gains, a rung that changes training only if that is surely worth it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.settings import StudySettings
from autoddp.study.decision import decide
from autoddp.study.finals import ladder_of
from autoddp.study.outcome import Standing
from autoddp.timing import Block, speedup

BASELINE = [1.00, 1.01, 0.99, 1.00, 1.01, 0.99]
OF_RUNG = {
    Rung.EXACT: Configuration({"bucket_cap_mb": 50.0}),
    Rung.NEAR: Configuration({"hook": "bf16"}),
    Rung.LOSSY: Configuration({"hook": "powersgd", "powersgd_rank": 1}),
}


def standing(rung: Rung, times: float, noise: float = 0.002) -> Standing:
    """So many times as fast as the baseline, in rounds that differ by `noise`."""
    seconds = [one / times * (1 + noise * (-1) ** number) for number, one in enumerate(BASELINE)]
    blocks = tuple(Block((second,)) for second in seconds)
    return Standing(OF_RUNG[rung], 1 / times, speedup(BASELINE, seconds), blocks)


@pytest.mark.parametrize(
    ("exact", "near", "lossy", "launched"),
    [
        (1.00, 1.00, 1.00, None),
        (1.02, 1.02, 1.02, Rung.EXACT),
        (1.00, 1.04, 1.00, None),
        (1.00, 1.20, 1.20, Rung.NEAR),
        (1.20, 1.24, 1.24, Rung.EXACT),
        (1.20, 1.24, 1.30, Rung.EXACT),  # not 5 % faster than near, which is not launched either
        (1.20, 1.22, 1.40, Rung.LOSSY),
        (1.20, 2.00, 2.05, Rung.NEAR),
        (1.00, 2.00, 12.0, Rung.LOSSY),
    ],
)
def test_a_change_of_training_must_be_worth_it(exact: float, near: float, lossy: float, launched: Rung | None) -> None:
    finalists = [standing(rung, times) for rung, times in zip(OF_RUNG, (exact, near, lossy), strict=True)]
    decision = decide(ladder_of(finalists), StudySettings(allow=Rung.LOSSY), 0.9)
    assert decision.configuration == (OF_RUNG[launched] if launched else AS_WRITTEN)


def test_a_milder_rung_that_could_not_be_launched_does_not_stand_in_the_way() -> None:
    """What is not surely faster than the user's settings would not be launched in the place of what is."""
    ladder = ladder_of([standing(Rung.EXACT, 1.10, noise=0.12), standing(Rung.LOSSY, 1.18)])
    assert not ladder[0].speedup.sure
    assert ladder[1].speedup_low_over[Rung.EXACT] < 1.05 < ladder[1].speedup.low
    decision = decide(ladder, StudySettings(allow=Rung.LOSSY), 0.5)
    assert decision.configuration == OF_RUNG[Rung.LOSSY]


def test_a_milder_rung_that_surely_gains_counts() -> None:
    ladder = ladder_of([standing(Rung.EXACT, 1.15), standing(Rung.LOSSY, 1.18)])
    decision = decide(ladder, StudySettings(allow=Rung.LOSSY), 0.5)
    assert decision.configuration == OF_RUNG[Rung.EXACT]
    assert "; lossy gives ×1.18 (" in decision.why
    assert decision.why.endswith(
        "not surely 5 % more than your settings and each milder rung that gains: too little for a change of training"
    )


def test_what_is_not_allowed_does_not_stand_in_the_way() -> None:
    ladder = ladder_of([standing(Rung.EXACT, 1.10), standing(Rung.NEAR, 1.50), standing(Rung.LOSSY, 9.0)])
    decision = decide(ladder, StudySettings(allow=Rung.NEAR), 0.9)
    assert decision.configuration == OF_RUNG[Rung.NEAR]
    assert decision.why.endswith("; --allow lossy would give ×9.00")


def test_more_is_only_promised_where_it_would_be_launched() -> None:
    ladder = ladder_of([standing(Rung.EXACT, 1.50), standing(Rung.NEAR, 1.51), standing(Rung.LOSSY, 1.52)])
    decision = decide(ladder, StudySettings(allow=Rung.EXACT), 0.9)
    assert decision.configuration == OF_RUNG[Rung.EXACT]
    assert "--allow" not in decision.why


def test_more_is_not_promised_with_a_smaller_gain_than_what_is_launched() -> None:
    """What is not allowed has three rounds. In the later ones others were at work, and gradients took longer."""
    exact, lossy = standing(Rung.EXACT, 1.5), standing(Rung.LOSSY, 1.7)
    later = [*BASELINE[:3], *(1.4 * one for one in BASELINE[3:])]
    gain = speedup(later, [block.median for block in exact.rounds])
    lossy = replace(lossy, rounds=lossy.rounds[:3], speedup=speedup(later[:3], [b.median for b in lossy.rounds[:3]]))
    decision = decide(ladder_of([replace(exact, speedup=gain), lossy]), StudySettings(allow=Rung.EXACT), 0.9)
    assert decision.configuration == OF_RUNG[Rung.EXACT]
    assert gain.ratio > lossy.speedup.ratio
    assert "--allow" not in decision.why


def test_the_ladder_knows_each_rung_against_all_milder_ones() -> None:
    slower = standing(Rung.EXACT, 1.01)
    exact, lossy = ladder_of([slower, standing(Rung.EXACT, 1.20), standing(Rung.LOSSY, 2.40)])
    assert exact.speedup_low_over == {}
    assert lossy.speedup_low_over == {Rung.EXACT: pytest.approx(2.0, rel=0.02)}
