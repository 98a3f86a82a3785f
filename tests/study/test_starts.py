"""The study of a script without DDP, whose measurements are starts: what it launches, and what it never does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.settings import Objective, StudySettings
from autoddp.study import Observer, Outcome, StartStudy, TrialFailed, TuningOver
from autoddp.wire import JobFacts

ONE, TWO = Configuration({"threads": 1}), Configuration({"threads": 2})
RING = Configuration({"nccl_algo": "Ring"})


def facts(*settings: Configuration) -> JobFacts:
    return JobFacts(
        world_size=2,
        nodes=1,
        backend="gloo",
        devices=("cpu",),
        torch="2.13.0",
        gradient_bytes=0,
        parameters_digest="no DDP model",
        ddp_arguments={},
        knobs=(),
        start_settings=settings,
    )


class Starts:
    """Costs by configuration; every start is counted. `noise`: the spread from one start to the next."""

    def __init__(self, costs: dict[Configuration, float], noise: float = 0.01, seed: int = 0) -> None:
        self.costs, self.noise = costs, noise
        self.made: list[Configuration] = []
        self.at: Callable[[int, Configuration], None] = lambda _number, _configuration: None
        self._random = random.Random(seed)

    def __call__(self, configuration: Configuration) -> float:
        self.made.append(configuration)
        self.at(len(self.made), configuration)
        if configuration not in self.costs:
            raise TrialFailed("rank 0: ValueError: planted")
        return self.costs[configuration] * self._random.lognormvariate(0, self.noise)


def run(
    starts: Starts,
    *settings: Configuration,
    left: float = 1e9,
    trials: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    asked = StudySettings(trials=trials, objective=Objective.parse("steps"))
    return StartStudy(starts, lambda: left, asked, Observer(), clock).run(lambda: facts(*settings))


def test_a_setting_that_gains_is_launched_after_paired_starts() -> None:
    starts = Starts({AS_WRITTEN: 0.1, ONE: 0.05, TWO: 0.09})
    outcome = run(starts, TWO, ONE)
    assert outcome.decision.configuration == ONE
    assert outcome.ladder[0].speedup.low > 1.5
    rounds = len(outcome.baseline_rounds)
    assert rounds >= 3
    paired = [set(starts.made[at : at + 2]) for at in range(3, 3 + 2 * rounds, 2)]
    assert paired == [{AS_WRITTEN, ONE}] * rounds


def test_settings_stand_on_top_of_each_other() -> None:
    both = ONE.with_values(**RING)
    outcome = run(Starts({AS_WRITTEN: 1.0, ONE: 0.5, both: 0.3, RING: 0.7}), ONE, RING)
    assert outcome.decision.configuration == both


def test_noise_alone_launches_nothing() -> None:
    """The first start is the slowest of all, so every setting looks good in its trial. That happens in some studies."""
    launched = []
    for seed in range(200):
        starts = Starts({AS_WRITTEN: 1.0, ONE: 1.0, TWO: 1.0}, noise=0.1, seed=seed)
        launched.append(run(starts, ONE, TWO).decision.configuration)
    assert launched.count(AS_WRITTEN) >= 198


def test_a_setting_that_fails_costs_its_start_alone() -> None:
    starts = Starts({AS_WRITTEN: 1.0, TWO: 0.5})
    outcome = run(starts, ONE, TWO)
    assert [trial.state for trial in outcome.trials] == ["failed", "measured"]
    assert starts.made.count(ONE) == 1
    assert outcome.decision.configuration == TWO


@pytest.mark.parametrize(("settings", "said"), [((ONE,), "the one setting"), ((ONE, TWO), "each of the 2 settings")])
def test_settings_that_all_fail_are_not_told_as_no_gain(settings: tuple[Configuration, ...], said: str) -> None:
    why = run(Starts({AS_WRITTEN: 1.0}), *settings).decision.why
    assert why == f"the script failed with {said} that was tried: your settings stay"


def test_what_fails_in_the_finals_is_not_launched() -> None:
    starts = Starts({AS_WRITTEN: 1.0, ONE: 0.5})

    def fail(number: int, configuration: Configuration) -> None:
        if number > 5 and configuration == ONE:
            raise TrialFailed("planted")

    starts.at = fail
    outcome = run(starts, ONE)
    assert outcome.decision.configuration == AS_WRITTEN
    assert "failed later" in outcome.decision.why


@pytest.mark.parametrize("after", range(2, 9))
def test_time_that_is_over_ends_it_with_an_answer(after: int) -> None:
    """Three rounds are six starts, behind two; before them nothing is decided, and so no recipe may be written."""
    starts = Starts({AS_WRITTEN: 1.0, ONE: 0.1}, noise=0.0)

    def over(number: int, _configuration: Configuration) -> None:
        if number > after:
            raise TuningOver("the --budget of 10s is over")

    starts.at = over
    outcome = run(starts, ONE)
    assert len(starts.made) == min(after, 8) + (after < 8)
    assert outcome.decision.is_open == (after < 8)
    assert outcome.decision.configuration == (AS_WRITTEN if after < 8 else ONE)
    assert after >= 8 or "undecided: " in outcome.decision.why


def test_no_start_is_made_for_which_there_is_no_time() -> None:
    starts = Starts({AS_WRITTEN: 1.0, ONE: 0.5})
    outcome = run(starts, ONE, left=0.0)
    assert starts.made == [AS_WRITTEN]
    assert outcome.decision.is_open
    assert "--budget" in outcome.decision.why


def test_a_script_that_fails_as_written_is_no_study() -> None:
    with pytest.raises(TrialFailed, match="planted"):
        run(Starts({ONE: 1.0}), ONE)


def test_nothing_to_try_is_an_answer() -> None:
    outcome = run(Starts({AS_WRITTEN: 1.0}))
    assert outcome.decision.why == "no setting that is read at the start has a reason to help here: your settings stay"


def test_as_many_trials_as_were_asked_for() -> None:
    starts = Starts({AS_WRITTEN: 1.0, ONE: 1.0, TWO: 0.1})
    assert run(starts, ONE, TWO, trials=1).decision.configuration == AS_WRITTEN
    assert starts.made == [AS_WRITTEN, ONE]


def test_the_budget_that_is_told_pays_for_what_was_not_tried() -> None:
    """It paid for the final rounds alone, so a start with that budget was undecided again."""
    now = [0.0]
    starts = Starts({AS_WRITTEN: 1.0})

    def takes(_number: int, _configuration: Configuration) -> None:
        now[0] += 60

    starts.at = takes
    why = run(starts, ONE, RING, left=0.0, clock=lambda: now[0]).decision.why
    assert "--budget 27m would decide it" in why
