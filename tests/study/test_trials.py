"""Spaces and guesses: every choice is a sound configuration of its rung, and none needs what the job lacks."""

from __future__ import annotations

import pytest
from simulated import SimulatedJob, error_of, every, facts

from autoddp.codec import replace
from autoddp.knobs import AS_WRITTEN, GRADIENT_RUNGS, Configuration, Rung
from autoddp.study import Observer, StudySettings, TrialRecord
from autoddp.study.budget import StepBudget
from autoddp.study.cost import Cost
from autoddp.study.reserve import Reserve
from autoddp.study.sampler import Sampler
from autoddp.study.space import Space
from autoddp.study.trials import Trials
from autoddp.timing import Block

ALL = list(GRADIENT_RUNGS)


@pytest.mark.parametrize("rung", ALL)
@pytest.mark.parametrize("mib", [0.1, 24.0, 1200.0])
def test_every_choice_is_a_configuration_of_the_rung(rung: Rung, mib: float) -> None:
    space = Space(rung, replace(facts(), gradient_bytes=int(mib * 2**20)))
    found = list(every(space))
    assert {configuration.rung for configuration in found} == {rung}
    assert len(set(found)) == len(found)
    assert (AS_WRITTEN in found) is (rung is Rung.EXACT)


@pytest.mark.parametrize("rung", ALL)
def test_a_guess_names_every_parameter_once(rung: Rung) -> None:
    space = Space(rung, facts())
    guesses = space.guesses()
    assert all(guess.keys() == space.choices.keys() for guess in guesses)
    assert all(value in space.choices[name] for guess in guesses for name, value in guess.items())
    assert len({space.configuration(guess) for guess in guesses}) == len(guesses)


@pytest.mark.parametrize("rung", ALL)
def test_the_job_without_a_knob_is_not_asked_for_it(rung: Rung) -> None:
    known = ("bucket_cap_mb", "gradient_as_bucket_view", "hook", "powersgd_rank")
    space = Space(rung, facts(known))
    assert not {"batched_grad_copy", "static_graph"} & space.choices.keys()
    assert not any("bucket_cap_mb_list" in setting for setting in space.choices["bucket_cap_mb"])
    assert all(guess.keys() == space.choices.keys() for guess in space.guesses())
    assert {name for configuration in every(space) for name in configuration} <= set(known)


@pytest.mark.parametrize("rung", ALL)
def test_a_static_graph_is_guessed_where_the_script_looks_for_unused_parameters(rung: Rung) -> None:
    space = Space(rung, facts(find_unused_parameters=True))
    guesses = [space.configuration(guess) for guess in space.guesses()]
    assert all(guess["static_graph"] is True for guess in guesses)
    assert guesses[0] == {"static_graph": True} or rung is not Rung.EXACT
    assert not any(
        "static_graph" in Space(rung, facts()).configuration(guess) for guess in Space(rung, facts()).guesses()
    )


def test_powersgd_is_varied_only_where_it_can_tell() -> None:
    """One matrix a bucket where shapes are many, narrow factors where they are large."""
    small, shapes = Space(Rung.LOSSY, facts()), Space(Rung.LOSSY, facts(matrix_shapes=20))
    large = Space(Rung.LOSSY, replace(facts(), gradient_bytes=400 * 2**20))
    assert {"powersgd_batched", "powersgd_factors"} & small.choices.keys() == set()
    assert shapes.choices["powersgd_batched"] == ({}, {"powersgd_batched": True})
    assert any(configuration.get("powersgd_factors") == "bf16" for configuration in every(large))
    for space in (shapes, large):
        guesses = [space.configuration(guess) for guess in space.guesses()]
        assert any({"powersgd_batched", "powersgd_factors"} & set(guess) for guess in guesses)


@pytest.mark.parametrize(("variant", "compared"), [({"powersgd_batched": True}, [8.0, 32.0]), ({}, [8.0])])
def test_where_a_bucket_is_one_matrix_its_size_counts_for_the_error(
    variant: dict[str, bool], compared: list[float]
) -> None:
    """Of a bucket four times as large, the same rank is half as large a part."""
    job = SimulatedJob(error=lambda values: error_of(0.98 if values["bucket_cap_mb"] == 32.0 else 0.9))
    cost, baseline = Cost(job), TrialRecord(0, AS_WRITTEN, "measured", (Block((1.0,)),))
    settings, reserve = StudySettings(allow=Rung.LOSSY), Reserve(cost, StepBudget(1.0))
    trials = Trials(cost, facts(matrix_shapes=20), settings, Observer(), baseline, reserve)
    small, large = (
        Configuration({"hook": "powersgd", "powersgd_rank": 1, "bucket_cap_mb": mib, **variant}) for mib in (8.0, 32.0)
    )
    assert [trials.vouches_for(one) for one in (small, large)] == [True, len(compared) == 1]
    assert [asked.configuration["bucket_cap_mb"] for asked in job.asked if asked.compare] == compared


def test_a_rung_with_nothing_to_try_is_empty() -> None:
    assert [Space(rung, facts(())).empty for rung in GRADIENT_RUNGS] == [True, True, True]
    assert [Space(rung, facts(("static_graph",))).empty for rung in GRADIENT_RUNGS] == [False, True, True]
    assert [Space(rung, facts(("hook", "powersgd_rank"))).empty for rung in GRADIENT_RUNGS] == [True, False, False]


def test_the_sampler_begins_with_the_guesses_and_repeats_nothing() -> None:
    space = Space(Rung.NEAR, facts())
    sampler = Sampler(space, seed=0)
    asked: list[Configuration] = []
    for number in range(20):
        asked.append(sampler.ask())
        sampler.tell(None if number % 5 == 4 else 1.0 + number / 100)
    guesses = [space.configuration(guess) for guess in space.guesses()]
    assert asked[: len(guesses)] == guesses
    assert len(set(asked)) == 20


@pytest.mark.parametrize("seed", range(5))
def test_the_script_as_written_is_no_trial(seed: int) -> None:
    space = Space(Rung.EXACT, facts(("static_graph", "gradient_as_bucket_view")))
    sampler = Sampler(space, seed, as_written=1.0)
    asked = []
    for _ in range(3):
        asked.append(sampler.ask())
        sampler.tell(2.0)
    assert len(set(asked)) == 3
    assert AS_WRITTEN not in asked


def test_a_space_that_is_used_up_is_asked_on() -> None:
    sampler = Sampler(Space(Rung.EXACT, facts(("static_graph",))), seed=0)
    asked = []
    for _ in range(4):
        asked.append(sampler.ask())
        sampler.tell(1.0)
    assert set(asked) == {AS_WRITTEN, Configuration({"static_graph": True})}
