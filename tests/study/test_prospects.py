"""Trials end when nothing more is likely to come of them: what that saves on simulated jobs, and what it misses."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from launchers import whole
from simulated import SimulatedJob, error_of, facts

from autoddp.knobs import AS_WRITTEN, GRADIENT_RUNGS, Configuration, Rung
from autoddp.study import Observer, Outcome, Study, StudySettings, TrialFailed, TrialRecord
from autoddp.study.prospects import Likely, Prospects
from autoddp.study.space import Space
from autoddp.timing import Block

LINKS = {"slow": (22.0, 0.001), "200": (200.0, 0.0005), "latency": (1000.0, 0.001), "fast": (5000.0, 0.0002)}
SHARE = {"slow": 0.67, "200": 0.67, "latency": 0.8, "fast": 1.0}  # of the steps that all trials take


class Watching(Observer):
    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def enough(self, number: int, planned: int) -> None:
        self.told.append((number, planned))


def run(job: SimulatedJob, observer: Observer | None = None, **asked: object) -> Outcome:
    return Study(job, facts(), StudySettings(**asked), observer or Observer()).run()


@pytest.mark.parametrize("allow", GRADIENT_RUNGS)
@pytest.mark.parametrize("link", ["slow", whole("200"), whole("latency"), "fast"])
def test_fewer_steps_find_as_much(link: str, allow: Rung) -> None:
    """What is launched is at most 3 % slower than the best."""
    jobs = [SimulatedJob(*LINKS[link], seed=1) for _ in range(2)]
    watching = Watching()
    outcome = run(jobs[0], watching, allow=allow, seed=1)
    run(jobs[1], allow=allow, seed=1, all_trials=True)
    assert jobs[0].clock < SHARE[link] * jobs[1].clock
    assert watching.told == [(len(outcome.trials), 20)]
    best = min(jobs[0].best(rung) for rung in GRADIENT_RUNGS if allow.allows(rung))
    assert jobs[0].cost(outcome.decision.configuration) <= 1.03 * best


@pytest.mark.parametrize("allow", GRADIENT_RUNGS)
def test_a_slow_link_is_decided_in_few_steps(allow: Rung) -> None:
    """Sixty of the baseline's, though twenty trials took more than a hundred."""
    job = SimulatedJob(*LINKS["slow"])
    run(job, allow=allow)
    assert job.clock < 50 * job.cost(AS_WRITTEN)


def test_what_is_not_allowed_runs_once() -> None:
    outcome = run(SimulatedJob(*LINKS["200"]), allow=Rung.EXACT)
    ran = Counter(trial.configuration.rung for trial in outcome.trials)
    assert (ran[Rung.NEAR], ran[Rung.LOSSY]) == (1, 1)
    assert [standing.rung for standing in outcome.ladder] == list(GRADIENT_RUNGS)


def test_a_rung_whose_hook_fails_tries_another() -> None:
    def spoil(_index: int, configuration: Configuration) -> None:
        if configuration.get("hook") == "bf16":
            raise TrialFailed("rank 1 killed by SIGABRT")

    outcome = run(SimulatedJob(*LINKS["200"], spoil=spoil), allow=Rung.EXACT)
    hooks = [trial.configuration.get("hook") for trial in outcome.trials if trial.configuration.rung is Rung.NEAR]
    assert hooks[-1] == "fp16"


def test_each_allowed_hook_runs_where_predictions_do_not_rule_it_out() -> None:
    job = SimulatedJob(*LINKS["200"])
    outcome = Study(job, facts(ddp_arguments={"bucket_cap_mb_list": "<a list>"}), StudySettings(), Observer()).run()
    assert outcome.profile is None  # nothing is predicted
    assert {trial.configuration.get("hook") for trial in outcome.trials} == {None, "bf16", "fp16", "powersgd"}


def test_the_best_lossy_hook_is_compared_before_it_is_launched() -> None:
    """Of the hooks that feed their error back only the fastest so far are compared in their trials."""
    job = SimulatedJob(*LINKS["slow"])
    outcome = run(job, allow=Rung.LOSSY, all_trials=True)
    compared = {Configuration(asked.configuration).hook for asked in job.asked if asked.compare}
    launched = outcome.decision.configuration
    assert launched.rung is Rung.LOSSY
    assert launched.hook in compared
    hooks = {trial.configuration.hook for trial in outcome.trials if trial.configuration.rung is Rung.LOSSY}
    assert len(compared & hooks) < len(hooks)


def test_a_lossy_hook_that_is_refused_before_the_finals_is_not_launched() -> None:
    """Rank 2 was never the fastest in its trial; once rank 1 fails in the finals it is compared, and refused."""
    job = SimulatedJob(*LINKS["slow"])

    def spoil(index: int, configuration: Configuration) -> None:
        in_finals = sum(asked.configuration == AS_WRITTEN for asked in job.asked) > 4
        if in_finals and configuration.get("powersgd_rank") == 1:
            raise TrialFailed("out of memory")

    job._spoil = spoil
    job._error = lambda configuration: error_of(0.97 if configuration.get("powersgd_rank") == 2 else 0.1)
    outcome = run(job, allow=Rung.LOSSY, all_trials=True)
    ranks = [standing.configuration.get("powersgd_rank") for standing in outcome.finalists]
    assert not {1, 2} & set(ranks)
    of_two = [trial for trial in outcome.trials if trial.configuration.get("powersgd_rank") == 2]
    assert {trial.state for trial in of_two} <= {"refused"}


def record(configuration: dict[str, object], seconds: float) -> TrialRecord:
    return TrialRecord(1, Configuration(configuration), "measured", (Block((seconds,)),))


def test_a_rung_goes_on_while_it_leads_and_brings_something() -> None:
    prospects = Prospects(Space(Rung.EXACT, facts()), StudySettings(), 1.0)
    assert prospects.is_open([], None, has_guesses=False)
    falling = [record({"bucket_cap_mb": float(cap)}, 1.0 - 0.1 * number) for number, cap in enumerate((1, 2, 4, 8, 16))]
    assert prospects.is_open(falling, None, has_guesses=False)
    over = [*falling, *(record({"bucket_cap_mb": 32.0 + number}, 0.65) for number in range(4))]
    assert not prospects.is_open(over, None, has_guesses=False)
    assert prospects.is_open(over, None, has_guesses=True)
    assert prospects.is_open(over, Likely(AS_WRITTEN, 0.02), has_guesses=False)
    assert not prospects.is_open(over, Likely(AS_WRITTEN, 0.005), has_guesses=True)
    far_ahead = [*over, record({"hook": "bf16"}, 0.2)]
    assert not prospects.is_open(far_ahead, None, has_guesses=True)


def test_a_gain_that_is_expected_is_not_negative() -> None:
    from autoddp.study.prospects import expected_gain

    gains = [expected_gain(1.0, predicted) for predicted in (0.5, 0.9, 0.98, 1.0, 1.02, 1.1, 2.0)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] == pytest.approx(0.5, abs=1e-3)
    assert 0 <= gains[-1] < 1e-9
    assert all(math.isfinite(gain) for gain in gains)
