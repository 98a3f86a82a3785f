"""Semifinals: what is let in, what drops out when, and what a bad moment in a trial does to a study."""

from __future__ import annotations

import random

import pytest
from simulated import SimulatedJob, facts

from autoddp.codec import replace
from autoddp.knobs import Configuration, Rung
from autoddp.study import Observer, Semifinal, Study, StudySettings, TrialFailed
from autoddp.study.budget import StepBudget
from autoddp.study.cost import Cost
from autoddp.study.semifinals import contenders, run_semifinal
from autoddp.timing import Block
from autoddp.wire import BlockDone

RANKS = [Configuration({"hook": "powersgd", "powersgd_rank": rank}) for rank in (1, 2, 4, 8)]
SLOW = StepBudget(1.0)


def semifinal_of(
    seconds: dict[Configuration, float], fails: int | None = None
) -> tuple[Semifinal, list[Configuration]]:
    """A heat on a model that takes just so long; its `fails`th measurement fails."""
    asked: list[Configuration] = []

    def measure(configuration: Configuration, warmup: int, steps: int, **_: object) -> BlockDone:
        asked.append(configuration)
        if len(asked) == fails:
            raise TrialFailed("out of memory")
        return BlockDone(len(asked), (seconds[configuration],) * steps, 0.0, 0.0)

    return run_semifinal(Cost(measure), SLOW, seconds, random.Random(0)), asked


def test_the_slowest_go_home_first() -> None:
    semifinal, asked = semifinal_of(dict(zip(RANKS, (0.043, 0.040, 0.045, 0.050), strict=True)))
    assert semifinal.ranked == [RANKS[1], RANKS[0], RANKS[2], RANKS[3]]
    assert [len(semifinal.rounds[c]) for c in semifinal.ranked] == [5, 5, 3, 2]
    assert [sorted(asked[i : i + 4], key=str) for i in (0, 4)] == [sorted(RANKS, key=str)] * 2
    assert len({tuple(asked[i : i + 4]) for i in (0, 4)}) > 1  # not always in one order


@pytest.mark.parametrize("fails", [1, 2, 3, 4, 9, 14])
def test_a_contender_that_fails_is_not_launched(fails: int) -> None:
    semifinal, asked = semifinal_of(dict(zip(RANKS, (0.043, 0.040, 0.045, 0.050), strict=True)), fails)
    assert asked[fails - 1] not in semifinal.rounds
    assert asked[fails - 1] not in asked[fails:]
    assert semifinal.ranked[0] == (RANKS[0] if asked[fails - 1] == RANKS[1] else RANKS[1])


def test_moments_in_which_somebody_else_uses_the_machine() -> None:
    """Recorded: both took 44.2 ms in the middle, the first with two bad moments; undisturbed it is 5 % faster."""
    first = (60.2, 47.5, 40.8, 42.7, 48.3, 42.0, 45.7, 56.9, 41.2, 37.5)
    second = (49.3, 48.1, 52.2, 41.1, 47.7, 44.1, 44.2, 44.2, 43.9, 40.5)
    blocks = tuple(tuple(Block((x,)) for x in seconds) for seconds in (second, first))
    semifinal = Semifinal((RANKS[1], RANKS[0]), blocks)
    assert semifinal.ranked == RANKS[:2]


def test_when_all_fail_there_is_no_winner() -> None:
    assert Semifinal((), ()).ranked == []


def test_whom_a_trial_could_not_tell_from_the_best() -> None:
    seconds = dict(zip(RANKS, (0.040, 0.051, 0.053, 0.30), strict=True))
    assert list(contenders(RANKS, seconds, SLOW)) == RANKS[:2]
    assert contenders(RANKS, seconds, StepBudget(0.1)) == {}  # not cheap beside the baseline
    assert contenders(RANKS[:1], seconds, SLOW) == {}  # nothing to decide
    long = {configuration: 20 * second for configuration, second in seconds.items()}
    assert contenders(RANKS, long, StepBudget(20.0)) == dict(list(long.items())[:2])
    assert contenders(RANKS, long, StepBudget(5.0)) == {}  # cheap beside the baseline, yet it would take minutes


@pytest.mark.parametrize("seed", range(4))
def test_a_bad_moment_in_a_trial_costs_nothing(seed: int) -> None:
    """The best of the lossy rung is a fifth slower in its trial alone."""
    plan = StudySettings(trials=20, all_trials=True, allow=Rung.LOSSY, seed=seed)
    undisturbed = Study(SimulatedJob(24.0, noise=0.002), facts(), plan, Observer()).run()
    best = undisturbed.ladder[-1].configuration
    assert best.rung is Rung.LOSSY

    job = SimulatedJob(24.0, noise=0.002)
    blocks = 0

    def measure(configuration: Configuration, warmup: int, steps: int, **more: bool) -> BlockDone:
        nonlocal blocks
        done = job(configuration, warmup, steps, **more)
        if configuration == best and steps:
            blocks += 1
            if blocks <= 3:
                return replace(done, seconds=tuple(1.2 * second for second in done.seconds))
        return done

    outcome = Study(measure, facts(), plan, Observer()).run()
    disturbed = next(trial for trial in outcome.trials if trial.configuration == best)
    assert disturbed.seconds > min(t.seconds for t in outcome.trials)
    tried = [job.cost(trial.configuration) for trial in outcome.trials if trial.configuration.rung is Rung.LOSSY]
    assert job.cost(outcome.ladder[-1].configuration) <= 1.01 * min(tried)
    assert len(outcome.ladder[-1].rounds) == len(outcome.baseline_rounds)
    assert len(outcome.semifinals[-1].rounds[best]) == 5
