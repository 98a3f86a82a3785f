"""A study and its saved recipe decide alike: whatever the rounds of its finals, whatever is allowed then or later."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as some

from autoddp.cli.tuned import recipe_of
from autoddp.commandline.mode import Mode
from autoddp.knobs import AS_WRITTEN, GRADIENT_RUNGS, Configuration, Rung
from autoddp.knobs.hook import start_step
from autoddp.recipe import Recipe, dump, parse
from autoddp.study import Outcome, Standing, StudySettings, TrialRecord
from autoddp.study.decision import decide
from autoddp.study.finals import ladder_of
from autoddp.timing import Block, median, speedup
from autoddp.wire import JobFacts

STEPS = 700  # of the real job, after a tenth of which PowerSGD begins; the recipe says so and trials leave it out
FACTS = JobFacts(
    world_size=2,
    nodes=1,
    backend="gloo",
    devices=("cpu",),
    torch="2.13.0",
    gradient_bytes=1024,
    parameters_digest="0123456789abcdef",
    ddp_arguments={},
    knobs=(),
)
EXACT = ({"bucket_cap_mb": 50.0}, {"threads": 2}, {"static_graph": True, "threads": 4})
NEAR = ({"hook": "bf16"}, {"hook": "bf16", "threads": 4})
LOSSY = ({"hook": "powersgd", "powersgd_rank": 2}, {"hook": "powersgd", "powersgd_rank": 1, "threads": 2})
BATCH = tuple({**values, "accumulate_steps": steps} for values in (*EXACT, *NEAR, *LOSSY) for steps in (2, 8))


def standing(values: dict[str, object], baseline: list[float], seconds: list[float]) -> Standing:
    blocks = tuple(Block((second,)) for second in seconds)
    return Standing(Configuration(values), median(seconds), speedup(baseline, seconds), blocks)


def outcome(ladder: tuple[Standing, ...], baseline: list[float], plan: StudySettings) -> Outcome:
    rounds = tuple(Block((second,)) for second in baseline)
    return Outcome(
        facts=FACTS,
        baseline=TrialRecord(0, AS_WRITTEN, "measured", rounds),
        headroom=0.5,
        headroom_block=Block((0.5,)),
        trials=(),
        baseline_rounds=rounds,
        finalists=ladder,
        ladder=ladder,
        decision=decide(ladder, plan, 0.5),
    )


def launched_by(recipe: Recipe, chosen: tuple[Rung, int] | None) -> tuple[Configuration, dict[str, str]]:
    mode = Mode(tune=False, recipe=recipe, several_nodes=False, chosen=chosen)
    return mode.configuration.without_variables, mode.variables


def decided(ladder: tuple[Standing, ...], plan: StudySettings) -> tuple[Configuration, dict[str, str]]:
    configuration = decide(ladder, plan, 0.5).configuration
    start = start_step(STEPS, configuration.steps_per_update)
    begins = {"powersgd_start_step": start} if configuration.get("hook") == "powersgd" else {}
    return configuration.with_values(**begins).without_variables, configuration.variables


@some.composite
def finals(draw: some.DrawFn) -> tuple[list[float], list[Standing]]:
    """Rounds of the baseline, and of one or two finalists of some rungs: near each other, where decisions turn."""
    count = draw(some.integers(2, 8))
    disturbed = some.lists(some.floats(0.98, 1.02), min_size=count, max_size=count)
    baseline = draw(disturbed)
    found = []
    for of_rung in (EXACT, NEAR, LOSSY, BATCH):
        for values in draw(some.lists(some.sampled_from(of_rung), max_size=2, unique_by=str)):
            times, noise = draw(some.floats(0.9, 1.5)), draw(disturbed)
            found.append(standing(values, baseline, [b * n / times for b, n in zip(baseline, noise, strict=True)]))
    return baseline, found


plans = some.builds(
    StudySettings, allow=some.sampled_from(GRADIENT_RUNGS), accumulate_up_to=some.sampled_from((1, 2, 8))
)


@settings(max_examples=300, deadline=None, database=None)
@given(finals(), plans, plans)
def test_a_saved_recipe_decides_as_its_study_would_have(
    rounds: tuple[list[float], list[Standing]], then: StudySettings, later: StudySettings
) -> None:
    baseline, finalists = rounds
    ladder = ladder_of(finalists)
    recipe = recipe_of(outcome(ladder, baseline, then), STEPS)
    again = parse(dump(recipe), "x")
    assert again == recipe
    assert launched_by(again, None) == decided(ladder, then)
    assert launched_by(again, (then.allow, then.accumulate_up_to)) == decided(ladder, then)
    assert launched_by(again, (later.allow, later.accumulate_up_to)) == decided(ladder, later)


def test_what_the_study_leaves_the_recipe_leaves() -> None:
    """16-bit gradients that gain 3 %, from 2 to 4: sure, and too little for a change of training."""
    baseline = [1.0] * 6
    near = standing(NEAR[0], baseline, [1 / 1.03 * noise for noise in (1.006, 0.994) * 3])
    assert (round(near.speedup.low, 2), round(near.speedup.high, 2)) == (1.02, 1.04)
    plan = StudySettings(allow=Rung.NEAR)
    made = outcome(ladder_of([near]), baseline, plan)
    assert made.decision.configuration == AS_WRITTEN
    recipe = parse(dump(recipe_of(made, STEPS)), "x")
    for chosen in (None, (Rung.NEAR, 1), (Rung.LOSSY, 1)):
        assert launched_by(recipe, chosen) == (AS_WRITTEN, {})


@pytest.mark.parametrize("values", [EXACT[0], EXACT[1], NEAR[1], BATCH[0]])
def test_an_entry_of_the_ladder_that_the_user_has_chosen_stays(values: dict[str, object]) -> None:
    """It was not surely faster, so the study has left it; whoever writes it into the recipe wants it all the same."""
    baseline = [1.0] * 6
    unsure = standing(values, baseline, [0.5, 1.4, 0.6, 1.2, 0.8, 1.3])
    plan = StudySettings(allow=Rung.NEAR, accumulate_up_to=2)
    recipe = recipe_of(outcome(ladder_of([unsure]), baseline, plan), STEPS)
    assert (recipe.configuration, recipe.env) == (AS_WRITTEN, {})
    own = Configuration(values)
    chosen = replace(recipe, configuration=own.without_variables, env=own.variables)
    for allowed in (None, (Rung.NEAR, 2), (Rung.LOSSY, 8)):
        assert launched_by(chosen, allowed) == (own.without_variables, own.variables)
    stays = own.allowed_by(Rung.EXACT, 1)
    assert launched_by(chosen, (Rung.EXACT, 1))[0] == (own.without_variables if stays else AS_WRITTEN)
    assert launched_by(recipe, (Rung.NEAR, 2)) == (AS_WRITTEN, {})


def without_margins(recipe: Recipe) -> Recipe:
    """The recipe after somebody has removed these lines."""
    return replace(recipe, ladder=tuple(replace(entry, speedup_low_over={}) for entry in recipe.ladder))


def test_a_recipe_without_paired_figures_is_taken_at_its_intervals_word() -> None:
    """By paired rounds near is surely 5 % faster than exact; by the intervals alone that is not known."""
    drift = [1.0, 1.3, 0.9, 1.2, 1.1, 1.4]
    baseline = [1.0] * 6
    exact = standing(EXACT[0], baseline, [one / 2 for one in drift])
    near = standing(NEAR[0], baseline, [one / 2.4 for one in drift])
    ladder = ladder_of([exact, near])
    recipe = recipe_of(outcome(ladder, baseline, StudySettings(allow=Rung.EXACT)), STEPS)
    assert launched_by(recipe, (Rung.NEAR, 1))[0] == near.configuration
    assert launched_by(without_margins(recipe), (Rung.NEAR, 1))[0] == exact.configuration


@pytest.mark.parametrize(("steps", "begins"), [(1, 70), (8, 8), (16, 4)])
def test_powersgd_begins_after_a_tenth_of_the_job_also_where_several_steps_are_one(steps: int, begins: int) -> None:
    """It counts reductions: 700 steps of which sixteen are one have 43."""
    baseline, more = [1.0] * 6, {"accumulate_steps": steps} if steps > 1 else {}
    found = standing({"hook": "powersgd", "powersgd_rank": 1, **more}, baseline, [0.1] * 6)
    plan = StudySettings(allow=Rung.LOSSY, accumulate_up_to=16)
    recipe = recipe_of(outcome(ladder_of([found]), baseline, plan), STEPS)
    assert recipe.configuration["powersgd_start_step"] == begins
    assert recipe.ladder[0].configuration["powersgd_start_step"] == begins
