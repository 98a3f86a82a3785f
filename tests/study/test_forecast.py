"""Forecasts in a study of a simulated job: what is predicted, in which order trials run, and what is left out."""

from __future__ import annotations

import re

import pytest
from simulated import SimulatedJob, facts

from autoddp.codec import replace
from autoddp.knobs import GRADIENT_RUNGS, Configuration
from autoddp.knobs.job import OWN_HOOK
from autoddp.study import Observer, Outcome, Study, StudySettings
from autoddp.study.forecast import Forecast
from autoddp.timing import median


class Unrecorded(SimulatedJob):
    """Records no timelines."""

    def _timeline(self, *_: object) -> None:  # type: ignore[override]
        return None

    def __call__(self, *args: object, timeline: int = 0, **more: object):  # type: ignore[no-untyped-def, override]
        return super().__call__(*args, **more)  # type: ignore[arg-type]


def study(job: SimulatedJob, trials: int, seed: int = 0) -> Outcome:
    return Study(job, facts(), StudySettings(trials=trials, seed=seed, all_trials=True), Observer()).run()


@pytest.mark.parametrize(("link", "latency"), [(24.0, 0.002), (200.0, 0.0005), (1000.0, 0.001), (5000.0, 0.0002)])
def test_trials_are_predicted(link: float, latency: float) -> None:
    outcome = study(SimulatedJob(link, latency), 20)
    found = [abs(t.predicted / t.seconds - 1) for t in outcome.trials if t.predicted and t.usable]
    assert len(found) >= 15
    assert median(found) <= 0.06
    assert outcome.profile is not None
    assert outcome.profile.typical_error == pytest.approx(median(found), abs=0.02)
    assert [line.rank for line in outcome.timelines] == [0, 1]


def test_what_was_not_recorded_is_not_predicted() -> None:
    outcome = study(Unrecorded(200.0), 8)
    assert outcome.profile is None
    assert {trial.predicted for trial in outcome.trials} == {None}


@pytest.mark.parametrize("plan", ["[1, 2, 3, 4, 5, ...", "<a list>", "5", "['a']", "[]"])
def test_arguments_that_cannot_be_read_do_not_end_a_study(plan: str) -> None:
    known = facts(ddp_arguments={"bucket_cap_mb_list": plan})
    outcome = Study(SimulatedJob(200.0), known, StudySettings(trials=6, all_trials=True), Observer()).run()
    assert len(outcome.trials) == 6
    assert (outcome.profile is None) == (plan != "[]")


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"parameters_digest": "01+23"}, "several DDP models"),
        ({"left_out": {"hook": OWN_HOOK}}, "a communication hook of its own"),
        ({"micro_batches": 0.0}, "reduce no gradients through DDP"),
        ({"micro_batches": 3.5}, r"differ in their number of reductions \(on average 3.5\)"),
        ({"ddp_arguments": {"bucket_cap_mb": "<a number>"}}, "sizes of buckets that cannot be read"),
        ({"gradient_shapes": ((512, 512),)}, "no steps were recorded on all ranks"),
    ],
)
def test_a_job_that_cannot_be_predicted_says_why_and_what_to_do(known: dict[str, object], why: str) -> None:
    outcome = Study(SimulatedJob(200.0), replace(facts(), **known), StudySettings(trials=4), Observer()).run()
    assert outcome.profile is None
    assert re.search(f"{why}.*; .", outcome.why_no_profile)


def test_no_steps_are_recorded_without_time_or_a_gain() -> None:
    short = Study(SimulatedJob(200.0, time=20.0), facts(), StudySettings(trials=200), Observer()).run()
    assert "no time to record" in short.why_no_profile
    quick = Study(SimulatedJob(1e6, 1e-6, copies=0.0), facts(), StudySettings(trials=4), Observer()).run()
    assert "its reductions take at most" in quick.why_no_profile
    assert short.profile is quick.profile is None
    assert study(SimulatedJob(200.0), 4).why_no_profile == ""


def regret(job: SimulatedJob, outcome: Outcome) -> float:
    """How much slower the winners are than the best of their rungs, on average; without one the script as written."""
    found = {standing.rung: standing.configuration for standing in outcome.ladder}
    return sum(job.cost(found.get(rung, Configuration())) / job.best(rung) - 1 for rung in GRADIENT_RUNGS) / 3


def test_few_trials_find_more_with_predictions() -> None:
    links = [(24.0, 0.002), (200.0, 0.0005), (500.0, 0.0005), (1000.0, 0.001), (5000.0, 0.0002)]
    means = []
    for kind in (Unrecorded, SimulatedJob):
        jobs = [kind(*link, seed=seed, noise=0.02) for link in links for seed in range(2)]
        means.append(sum(regret(job, study(job, 6, seed)) for seed, job in enumerate(jobs)) / len(jobs))
    without, predicted = means
    assert predicted <= without
    assert predicted <= 0.015


def test_nothing_is_hopeless_before_anything_is_known() -> None:
    assert not Forecast().is_hopeless(Configuration({"bucket_cap_mb": 1}), 1e-9)
    outcome = study(SimulatedJob(200.0), 6)
    assert outcome.profile is not None
    young = Forecast(outcome.profile, outcome.baseline.seconds)
    assert not young.is_hopeless(Configuration({"bucket_cap_mb": 1}), 1e-9)
    for cap in (1, 2, 4, 8):
        known = Configuration({"bucket_cap_mb": cap})
        young.measured(known, young.seconds(known) or 1.0, young.seconds(known))
    assert young.is_hopeless(Configuration({"bucket_cap_mb": 16}), 1e-9)
    assert not young.is_hopeless(Configuration({"bucket_cap_mb": 16}), outcome.baseline.seconds)
    assert not young.is_hopeless(Configuration({"bucket_cap_mb": 16, "hook": "bf16"}), 1e-9)  # a hook never measured
