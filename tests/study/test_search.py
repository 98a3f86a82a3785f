"""A whole study on a simulated job whose true cost is known: what it finds, what it refuses, what it survives."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
from launchers import whole
from simulated import MIB, NOT_EVERYWHERE, SimulatedJob, error_of, facts

from autoddp import codec
from autoddp.knobs import AS_WRITTEN, BY_NAME, GRADIENT_RUNGS, Configuration, GradientError, Rung
from autoddp.knobs.env import keeps_memory
from autoddp.study import (
    Observer,
    Outcome,
    Study,
    StudySettings,
    TrialFailed,
    TrialRecord,
    TuningOver,
)
from autoddp.study.env_trials import ROUNDS
from autoddp.timing.anatomy import STAGES, RankSteps
from autoddp.units import percent
from autoddp.wire import BlockDone

LINKS = {  # MiB per second, seconds of latency
    "slow": (200.0, 0.0005),
    "medium": (500.0, 0.0005),
    "latency": (1000.0, 0.001),
    "fast": (5000.0, 0.0002),
}
BUCKETS_ONLY = ("bucket_cap_mb",)
ALL = StudySettings(trials=20, all_trials=True)


def run(job: SimulatedJob, knobs: tuple[str, ...] | None = None, **plan: object) -> Outcome:
    known = facts() if knobs is None else facts(knobs)
    return Study(job, known, StudySettings(**plan), Observer()).run()


def job_on(link: str, seed: int = 0, **more: object) -> SimulatedJob:
    return SimulatedJob(*LINKS[link], seed=seed, **more)


def tuned_with(link: str, seed: int) -> tuple[SimulatedJob, Outcome]:
    job = job_on(link, seed)
    return job, run(job, trials=20, all_trials=True, seed=seed)


@functools.cache
def unhurried(link: str) -> tuple[SimulatedJob, Outcome]:
    """A study that has time for all of its trials. Several tests look at it."""
    return tuned_with(link, 0)


@pytest.mark.parametrize("seed", [0, *map(whole, range(1, 6))])
@pytest.mark.parametrize("link", LINKS)
def test_the_best_of_each_rung_is_found(link: str, seed: int) -> None:
    job, outcome = unhurried(link) if seed == 0 else tuned_with(link, seed)
    assert [standing.rung for standing in outcome.ladder] == list(GRADIENT_RUNGS)
    for standing in outcome.ladder:
        assert job.cost(standing.configuration) <= 1.03 * job.best(standing.rung)
        true = job.cost(AS_WRITTEN) / job.cost(standing.configuration)
        assert standing.speedup.low * 0.995 <= true <= standing.speedup.high * 1.005


def test_interruptions_of_the_script_do_not_spoil_it() -> None:
    job = job_on("medium", interruption=2.0)
    outcome = run(job, trials=20, all_trials=True)
    blocks = [block for record in (outcome.baseline, *outcome.trials) for block in record.blocks]
    blocks += [*outcome.baseline_rounds, *(block for finalist in outcome.finalists for block in finalist.rounds)]
    assert sum(second > 2.0 for block in blocks for second in block.seconds) >= 3
    for standing in outcome.ladder:
        assert job.cost(standing.configuration) <= 1.03 * job.best(standing.rung)


class Loading(SimulatedJob):
    """Sixteen batches wait for it, and steps as written give the loaders the time to load them again.

    Once they are used up, a step takes as long as a batch: `every` seconds.
    """

    every = 0.1
    full = ready = 16

    def __call__(
        self, configuration: Configuration, warmup: int, steps: int, *, anatomy: bool = False, **more: Any
    ) -> BlockDone:
        more.pop("experiment", None)
        done = super().__call__(configuration, warmup, steps, **more)
        self.ready = self.full if more.get("reduce", True) else self.ready
        waits = [self._wait(one) for one in done.seconds]
        seconds = tuple(map(sum, zip(done.seconds, waits, strict=True)))
        stages = tuple((wait, *(0.0,) * (len(STAGES) - 1)) for wait in waits)
        ranks = (RankSteps(0, "host", seconds, stages),) if anatomy else ()
        return codec.replace(done, seconds=seconds, queued=16, ranks=ranks)

    def _wait(self, seconds: float) -> float:
        self.ready -= 1
        return max(0.0, self.every - seconds) if self.ready < 0 else 0.0


def test_a_speedup_is_that_of_a_job_whose_queues_are_empty() -> None:
    job = Loading(*LINKS["slow"])
    outcome = run(job, trials=12, all_trials=True)
    assert job.cost(AS_WRITTEN) > 0.1 > 2 * job.best(Rung.LOSSY)
    for standing in outcome.ladder:
        assert standing.pace == pytest.approx(0.1, rel=0.05)
        assert standing.speedup.ratio <= 1.05 * job.cost(AS_WRITTEN) / 0.1
    assert "diagnosis" not in outcome.wall_seconds  # none is made: the pace is a part of the final rounds


class Empty(Loading):
    """As with one worker, whose loading takes most of a step as written: no batch ever waits for the script."""

    full = ready = 0


def test_waits_in_the_headroom_are_not_counted_twice() -> None:
    """Its steps without reduction take 0.1 s too, of which they wait for 0.07 s."""
    job = Empty(*LINKS["slow"])
    outcome = run(job, trials=12, all_trials=True)
    assert outcome.headroom_block.median == pytest.approx(0.1, rel=0.05)
    for standing in outcome.ladder:
        assert standing.pace == pytest.approx(0.1, rel=0.05)
    best = max(standing.speedup.ratio for standing in outcome.ladder)
    assert best == pytest.approx(job.cost(AS_WRITTEN) / 0.1, rel=0.05)


class Starved(Empty):
    """No batch is ever ready, and with two threads of the model the workers have the cores to load twice as fast."""

    def __call__(self, configuration: Configuration, warmup: int, steps: int, **more: Any) -> BlockDone:
        self.every = 0.1 if configuration.get("threads") == 2 else 0.2
        return super().__call__(configuration, warmup, steps, **more)


def test_threads_may_win_by_what_they_leave_to_the_loaders() -> None:
    job = Starved(1e7, latency=0.0, copies=0.1)
    outcome = Study(job, facts(thread_counts=(2,)), ALL, Observer()).run()
    assert outcome.decision.configuration == Configuration({"threads": 2})
    assert outcome.ladder[0].speedup.ratio == pytest.approx(2.0, rel=0.05)


class Crowded(Loading):
    """With two threads of the model a step takes less than half, and the workers have no cores to keep up."""

    def __call__(self, configuration: Configuration, warmup: int, steps: int, **more: Any) -> BlockDone:
        self.every = 0.06 if configuration.get("threads") == 2 else 0.0
        return super().__call__(configuration, warmup, steps, **more)


def test_threads_that_starve_the_loaders_are_not_launched() -> None:
    """Their blocks live on sixteen batches that wait: ×2.5 in the rounds, and half as fast once launched."""
    job = Crowded(1e7, latency=0.0, copies=0.1, computing=lambda c: 0.4 if c.get("threads") == 2 else 1.0)
    outcome = Study(job, facts(thread_counts=(2,)), ALL, Observer()).run()
    assert outcome.trials[0].seconds < 0.5 * outcome.baseline.seconds
    assert outcome.decision.configuration == AS_WRITTEN


class Barely(Loading):
    """With two threads of the model it computes faster than the loaders load, by less than a fifth of a step before."""

    every = 0.016


def test_a_speedup_by_threads_is_no_larger_than_what_the_loaders_give() -> None:
    job = Barely(1e7, latency=0.0, copies=0.1, computing=lambda c: 0.4 if c.get("threads") == 2 else 1.0)
    outcome = Study(job, facts(thread_counts=(2,)), ALL, Observer()).run()
    assert outcome.ladder[0].speedup.ratio == pytest.approx(job.cost(AS_WRITTEN) / 0.016, rel=0.05)


class Uneven(Loading):
    """A second host computes in no time, and has a batch every 0.08 s: so it waits longer than the first one."""

    def __call__(
        self, configuration: Configuration, warmup: int, steps: int, *, anatomy: bool = False, **more: Any
    ) -> BlockDone:
        done = super().__call__(configuration, warmup, steps, anatomy=anatomy, **more)
        rest = (0.0,) * (len(STAGES) - 1)
        waits = [tuple(0.08 if of_step[0] else 0.0 for of_step in one.stages) for one in done.ranks]
        second = (RankSteps(1, "other", one, tuple((wait, *rest) for wait in one)) for one in waits)
        return codec.replace(done, ranks=(*done.ranks, *second))


def test_the_pace_is_that_of_the_slower_host() -> None:
    outcome = run(Uneven(*LINKS["slow"]), trials=12, all_trials=True)
    for standing in outcome.ladder:
        assert standing.pace == pytest.approx(0.1, rel=0.05)


class Ready(Loading):
    every = 0.0


def test_steps_in_which_the_script_saves_are_not_taken_for_slow_loaders() -> None:
    """Each 25th step saves for 0.9 s, and loaders have their batches ready all the same."""
    outcome = run(Ready(*LINKS["slow"], interruption=0.9), trials=12, all_trials=True)
    assert {standing.pace for standing in outcome.ladder} == {0.0}
    assert max(standing.speedup.ratio for standing in outcome.ladder) > 2


class Ending(Loading):
    """It ends while its queues are emptied, as a script of unknown length may: the next start has full ones."""

    def __call__(
        self, configuration: Configuration, warmup: int, steps: int, *, anatomy: bool = False, **more: Any
    ) -> BlockDone:
        done = super().__call__(configuration, warmup, steps, anatomy=anatomy, **more)
        return codec.replace(done, start=codec.replace(done.start, number=1)) if anatomy else done


def test_what_another_start_gives_is_no_pace() -> None:
    outcome = run(Ending(*LINKS["slow"]), trials=12, all_trials=True)
    assert {standing.pace for standing in outcome.ladder} == {0.0}


def test_headroom_is_the_share_of_the_reduction() -> None:
    job = job_on("medium")
    assert run(job, trials=0).headroom == pytest.approx(1 - 0.030 / job.cost(AS_WRITTEN), abs=0.01)


def test_no_trial_where_nothing_can_be_won() -> None:
    job = SimulatedJob(link_mib_per_second=1e7, latency=0.0, copies=0.3, noise=0.002)
    outcome = run(job, trials=20, all_trials=True)
    assert 0.005 < outcome.headroom < 0.03
    assert (outcome.trials, outcome.finalists, outcome.ladder) == ((), (), ())
    assert outcome.decision.configuration == AS_WRITTEN
    low, high = outcome.headroom_interval
    assert low <= outcome.headroom <= high < 0.03
    assert outcome.decision.why == (
        f"only {percent(outcome.headroom, '.1f')} of the step could be won, surely no more than "
        f"{percent(high, '.1f')}, so no trial was run: your settings stay"
    )
    assert {Configuration(asked.configuration) for asked in job.asked} == {AS_WRITTEN}


def test_where_nothing_may_be_changed_the_decision_says_why() -> None:
    known = facts((), left_out={"hook": "delayed reductions are used", "threads": "delayed reductions are used"})
    decision = Study(job_on("medium"), known, StudySettings(trials=3), Observer()).run().decision
    assert decision.configuration == AS_WRITTEN
    assert decision.why.startswith(
        "nothing can be tried in this job (delayed reductions are used): your settings stay; "
        "once that has changed, tune again with --trials 20; headroom "
    )
    assert not decision.is_open


def test_a_small_headroom_that_is_not_sure_is_tried() -> None:
    """Steps that scatter by 30 %: after a few rounds nobody knows whether there is something to win."""
    unsure = [run(SimulatedJob(1e7, latency=0.0, copies=0.3, noise=0.3, seed=seed), trials=2) for seed in range(10)]
    for outcome in unsure:
        assert outcome.headroom_interval[1] > 0.03
        assert len(outcome.trials) == 2
        assert "only" not in outcome.decision.why
    assert any("headroom up to " in outcome.decision.why for outcome in unsure)


def test_rounds_are_added_only_where_they_decide() -> None:
    """A link that is surely worth tuning costs no more steps than before; one that is likely not is looked at again."""
    slow = job_on("slow")
    run(slow, trials=0)
    assert sum(not asked.reduce for asked in slow.asked) == 4
    unsure = SimulatedJob(link_mib_per_second=1e7, latency=0.0, copies=0.3, noise=0.05)
    run(unsure, trials=0)
    assert 4 < sum(not asked.reduce for asked in unsure.asked) <= 12


def test_short_steps_without_reduction_are_measured_more_often_than_long_steps_with_it() -> None:
    job = job_on("slow")
    run(job, trials=0)
    places = [place for place, asked in enumerate(job.asked) if not asked.reduce]
    without, with_it = ([job.asked[place + after].steps for place in places] for after in (0, 1))
    assert {without[0], *with_it} == {3}
    assert min(without[1:]) > 6


@pytest.mark.parametrize(("seeds", "most"), [(4, 1), whole(20, 3)])
def test_never_slower_where_the_script_is_best_already(seeds: int, most: int) -> None:
    """A latency that makes one bucket the best, and only bucket caps to turn: the default of 25 MiB is it."""
    whys = []
    for seed in range(seeds):
        job = SimulatedJob(500.0, latency=0.05, seed=seed)
        outcome = run(job, BUCKETS_ONLY, trials=10, seed=seed)
        assert outcome.headroom > 0.5
        assert job.cost(outcome.decision.configuration) <= job.cost(AS_WRITTEN)
        whys.append(outcome.decision.why)
    # A cap of 32 MiB is the same single bucket; chance may call it faster now and then, at no cost.
    stay = "no significant gain within what you allow (near): your settings"
    assert sum(not why.startswith(stay) for why in whys) <= most


@pytest.mark.parametrize("allow", list(GRADIENT_RUNGS))
def test_only_what_is_allowed_is_launched(allow: Rung) -> None:
    outcome = run(job_on("slow"), trials=15, allow=allow)
    assert outcome.decision.configuration.rung is allow  # on a slow link each rung beats the one below it
    assert ("--allow lossy would give ×" in outcome.decision.why) is (allow is not Rung.LOSSY)
    assert outcome.decision.further is (None if allow is Rung.LOSSY else Rung.LOSSY)
    assert {record.configuration.rung for record in outcome.trials} == set(GRADIENT_RUNGS)


@pytest.mark.parametrize("seed", [0, *map(whole, (1, 2, 3))])
def test_the_milder_rung_is_taken_when_equal(seed: int) -> None:
    """On the fast link the last small bucket decides, and 16 bits win nothing that could be measured."""
    outcome = run(job_on("fast", seed), trials=20, all_trials=True, allow=Rung.LOSSY, seed=seed)
    assert outcome.decision.configuration.rung is Rung.EXACT
    assert outcome.decision.configuration != AS_WRITTEN


def refuse_fp16(_index: int, configuration: Configuration) -> None:
    if configuration.get("hook") == "fp16":
        raise TrialFailed("rank 1 killed by SIGABRT")


def test_a_failing_configuration_costs_only_itself() -> None:
    outcome = run(job_on("slow", spoil=refuse_fp16), trials=20, all_trials=True)
    failed = [record for record in outcome.trials if record.state == "failed"]
    assert failed
    assert {record.reason for record in failed} == {"rank 1 killed by SIGABRT"}
    assert all(record.blocks == () and record.seconds == float("inf") for record in failed)
    assert len(outcome.trials) == 20
    assert outcome.decision.configuration["hook"] == "bf16"
    assert all(standing.configuration.get("hook") != "fp16" for standing in outcome.finalists)


def test_what_fails_in_the_finals_is_not_launched() -> None:
    first = run(job_on("slow"), trials=9)
    winner = first.decision.configuration
    job = job_on("slow", spoil=lambda index, c: _fail(c == winner and index > last_trial))
    last_trial = sum(1 for _ in _asked_by(first)) - blocks_of_finals(first)
    outcome = run(job, trials=9)
    assert winner in {record.configuration for record in outcome.trials if record.state == "measured"}
    assert winner not in {standing.configuration for standing in outcome.finalists}
    assert outcome.decision.configuration.rung is Rung.NEAR


def test_where_every_trial_fails_that_is_what_is_said() -> None:
    """Nothing was compared, so nobody knows whether anything gains."""
    outcome = run(job_on("slow", spoil=lambda _index, c: _fail(c != AS_WRITTEN)), trials=4)
    assert {record.state for record in outcome.trials} == {"failed"}
    assert outcome.decision.why == "no trial is of use (the last failed: out of memory): your settings stay"


def test_a_trial_that_was_slower_is_nothing_to_prove() -> None:
    tried: set[Configuration] = set()

    def spoil(index: int, configuration: Configuration) -> None:
        if configuration not in {AS_WRITTEN, *tried} and tried:
            raise TuningOver("the disk is full")
        tried.update({configuration} - {AS_WRITTEN})

    job = job_on("slow", spoil=spoil, computing=lambda configuration: 1.0 if configuration == AS_WRITTEN else 90.0)
    decision = run(job, trials=4).decision
    assert decision.is_open
    assert decision.why.startswith(f"undecided: no trial was faster so far ({next(iter(tried))}: ×0.")
    assert decision.why.endswith(": your settings stay (the disk is full)")


def test_where_all_finalists_fail_no_final_rounds_are_asked_for() -> None:
    """The next start would come to the same, so this is an answer."""
    before = job_on("slow")
    first = run(before, trials=2)
    of_trials = len(before.asked) - blocks_of_finals(first)
    outcome = run(job_on("slow", spoil=lambda index, c: _fail(c != AS_WRITTEN and index >= of_trials)), trials=2)
    assert [record.state for record in outcome.trials] == ["measured"] * 2
    assert outcome.decision.configuration == AS_WRITTEN
    assert outcome.decision.why.endswith("and it failed later: your settings stay")
    assert not outcome.decision.is_open


def _fail(condition: bool) -> None:
    if condition:
        raise TrialFailed("out of memory")


def blocks_of_finals(outcome: Outcome) -> int:
    return len(outcome.baseline_rounds) + sum(len(standing.rounds) for standing in outcome.finalists)


def _asked_by(outcome: Outcome) -> list[object]:
    """As many entries as the study made measurements."""
    job = job_on("slow")
    assert run(job, trials=len(outcome.trials)).decision == outcome.decision
    return list(job.asked)


@pytest.mark.parametrize("error", [TrialFailed, TuningOver])
def test_without_a_baseline_there_is_no_outcome(error: type[Exception]) -> None:
    def spoil(index: int, _configuration: Configuration) -> None:
        if index >= 3:
            raise error("the script fails as written")

    with pytest.raises(error, match="as written"):
        run(job_on("slow", spoil=spoil))


@pytest.mark.parametrize("link", ["slow", "medium"])
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_script_that_fails_without_reduction_is_tuned_without_a_headroom(fails_at: int, link: str) -> None:
    """Steps with and without reduction alternate; where one fails in or after the latter, no more of them are made."""

    def spoil(index: int, _configuration: Configuration) -> None:
        _fail(index == fails_at)

    job = job_on(link, spoil=spoil)
    outcome = run(job, trials=12)
    assert all(asked.reduce for asked in job.asked[fails_at + 1 :])
    assert (outcome.headroom_interval, outcome.headroom_block.seconds) == ((0.0, 1.0), ())
    assert len(outcome.baseline.blocks) >= 2
    assert outcome.decision.configuration != AS_WRITTEN
    assert outcome.ladder[-1].speedup.low > 1.5


def test_over_is_over_in_a_trial_too() -> None:
    def spoil(_index: int, configuration: Configuration) -> None:
        if configuration != AS_WRITTEN:
            raise TuningOver("the launcher of node 1 is gone")

    job = job_on("slow", spoil=spoil)
    outcome = run(job)
    assert (outcome.trials, outcome.ended) == ((), "the launcher of node 1 is gone")
    assert job.asked[-1].configuration != AS_WRITTEN  # nothing was asked after it
    decision = outcome.decision
    assert (decision.configuration, decision.is_open) == (AS_WRITTEN, True)
    assert decision.why.startswith("tuning ended before the first trial: your settings stay; headroom ")
    assert decision.why.endswith("(the launcher of node 1 is gone)")


def test_a_seed_and_its_measurements_decide_everything() -> None:
    jobs = [unhurried("medium")[0], job_on("medium"), job_on("medium")]
    others = [run(job, trials=20, all_trials=True, seed=seed) for job, seed in zip(jobs[1:], (0, 1), strict=True)]
    outcomes = [unhurried("medium")[1], *others]
    assert jobs[0].asked == jobs[1].asked
    assert [t.configuration for t in outcomes[0].trials] == [t.configuration for t in outcomes[1].trials]
    assert jobs[0].asked != jobs[2].asked


def test_finals_measure_all_in_turn_in_changing_order() -> None:
    job = job_on("medium")
    outcome = run(job, trials=12)
    contenders = {AS_WRITTEN, *(standing.configuration for standing in outcome.finalists)}
    assert [standing.rung for standing in outcome.finalists] == list(GRADIENT_RUNGS)  # the best of each
    width, finals = len(contenders), job.asked[-blocks_of_finals(outcome) :]
    assert len(finals) >= 3 * width
    orders = [[Configuration(asked.configuration) for asked in finals[i * width :][:width]] for i in range(3)]
    assert all(set(order) == contenders for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert all(asked.apply and asked.reduce and asked.warmup > 0 for asked in finals)


def test_rungs_take_turns() -> None:
    _, outcome = unhurried("medium")
    assert [record.number for record in outcome.trials] == list(range(1, 21))
    assert [r.configuration.rung.value for r in outcome.trials[:4]] == ["exact", "near", "lossy", "exact"]
    only_buckets = run(job_on("medium"), BUCKETS_ONLY, trials=5)
    assert {record.configuration.rung for record in only_buckets.trials} == {Rung.EXACT}


def test_a_clear_loser_is_cut_short() -> None:
    _, outcome = unhurried("slow")
    cut = [record for record in outcome.trials if record.state == "cut short"]
    assert cut
    assert all(len(record.blocks) == 1 and "times the best of its rung" in record.reason for record in cut)


def test_steps_that_gain_are_judged_when_they_have_settled() -> None:
    """The first four steps after each switch take twice as long: no trial that gains is too slow by them."""

    def cold(number: int) -> float:
        return 2.0 if number < 4 else 1.0

    job = SimulatedJob(30.0, latency=0.0005, cold=cold)
    outcome = run(job, trials=20, all_trials=True)
    gaining = [r for r in outcome.trials if job.cost(r.configuration) < 0.3 * job.cost(AS_WRITTEN)]
    cut = [record for record in gaining if record.state == "cut short"]
    assert len(gaining) >= 5
    assert all(record.seconds < 1.5 * job.cost(record.configuration) for record in gaining)
    assert all(job.cost(record.configuration) > 1.4 * job.best(Rung.LOSSY) for record in cut)


@pytest.mark.parametrize("trials", [1, 2, 3])
def test_few_trials(trials: int) -> None:
    outcome = run(job_on("slow"), trials=trials)
    assert len(outcome.trials) == trials
    assert outcome.decision.configuration in {AS_WRITTEN, *(record.configuration for record in outcome.trials)}


IN_SHORT = {("slow", 2.0), ("fast", 2.0), ("medium", 8.0), ("slow", 32.0)}
TIMES = itertools.product(LINKS, (2.0, 4.0, 8.0, 16.0, 32.0))


@pytest.mark.parametrize(("link", "time"), [pair if pair in IN_SHORT else whole(*pair) for pair in TIMES])
def test_the_study_is_over_in_time(link: str, time: float) -> None:
    """Trials are left out before the final rounds without which nothing can be decided."""
    job = job_on(link, time=time)
    outcome = run(job, trials=20, all_trials=True)
    # Without a baseline there is nothing at all: it is measured whatever it takes.
    assert job.clock < 1.1 * time or not outcome.trials
    assert bool(outcome.ladder) is bool(outcome.trials)
    assert all(len(standing.rounds) >= 3 for standing in outcome.ladder)
    assert len(outcome.trials) <= len(unhurried(link)[1].trials)


def test_no_time_at_all_is_said() -> None:
    outcome = run(job_on("slow", time=0.0), trials=20, all_trials=True)
    assert outcome.trials == ()
    assert outcome.decision.configuration == AS_WRITTEN
    assert outcome.decision.why.startswith("there was no time for a trial: your settings stay; headroom ")


def test_that_long_steps_have_no_time_for_a_trial_is_said_after_three_of_them() -> None:
    """They were measured with and without reduction for minutes, until nearly all of the time was over."""
    job = SimulatedJob(1.5, time=300.0)
    with pytest.raises(TuningOver, match=r"^a step takes 16 s, so there is no time for a trial: --budget [0-9]+m "):
        run(job, trials=20)
    assert [asked.warmup + asked.steps for asked in job.asked] == [3]
    assert run(SimulatedJob(1.5, time=1800.0), trials=20).trials


def test_steps_and_seconds_are_accounted_for() -> None:
    job = job_on("medium")
    outcome = run(job, trials=10)
    assert outcome.steps == {
        "measured": sum(asked.steps for asked in job.asked),
        "warm-up": sum(asked.warmup for asked in job.asked),
        "compared": sum(asked.compare for asked in job.asked),
    }
    assert outcome.wall_seconds["measured"] > 0.9 * outcome.steps["measured"] * 0.03
    assert outcome.wall_seconds["turns"] == pytest.approx(0.001 * len(job.asked))
    assert facts().gradient_bytes == MIB * 2**20


class Watching(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.left: list[float] = []

    def trial(self, record: TrialRecord, planned: int, best: TrialRecord | None, seconds_left: float) -> None:
        assert best is None or best.seconds <= record.seconds
        assert seconds_left >= 0
        self.left.append(seconds_left)
        self.told.append(f"trial {record.number}/{planned}")

    def final(self, number: int, planned: int) -> None:
        self.told.append(f"final {number}/{planned}")

    def finished(self, outcome: Outcome) -> None:
        self.told.append("finished")


def test_an_observer_is_told_everything() -> None:
    watching = Watching()
    Study(job_on("medium", noise=0.002), facts(), StudySettings(trials=3), watching).run()
    finals = [f"final {number}/12" for number in range(1, 4)]
    assert watching.told == ["trial 1/3", "trial 2/3", "trial 3/3", *finals, "finished"]


def test_no_more_time_is_told_to_be_left_than_the_budget_has() -> None:
    """Where each trial starts the script anew, "13 min 51 s left" stood beside "tuning ends in at most 4 min 59 s"."""
    watching, job = Watching(), SimulatedJob(time=60.0)
    Study(job, facts(), StudySettings(trials=10**6, all_trials=True), watching).run()
    assert watching.left
    assert max(watching.left) < 60.0


def threaded(best: int, **more: object) -> SimulatedJob:
    """A job whose computing takes 0.6 times as long with `best` threads and 1.5 times with any other number."""
    return SimulatedJob(computing=lambda c: {None: 1.0, best: 0.6}.get(c.get("threads"), 1.5), **more)


@pytest.mark.parametrize("best", [1, 4, 8])
def test_the_number_of_threads_is_found_first_and_kept(best: int) -> None:
    outcome = Study(threaded(best), facts(thread_counts=(1, 2, 4, 8)), ALL, Observer()).run()
    tried = [trial.configuration.get("threads") for trial in outcome.trials]
    assert tried == [1, 2, 4, 8] + [best] * 16
    assert outcome.decision.configuration["threads"] == best
    assert [standing.rung for standing in outcome.ladder] == list(GRADIENT_RUNGS)


def test_threads_may_win_where_the_reduction_costs_nothing() -> None:
    job = threaded(2, link_mib_per_second=1e7, latency=0.0, copies=0.1)
    outcome = Study(job, facts(thread_counts=(1, 2)), ALL, Observer()).run()
    assert outcome.headroom < 0.03
    assert [trial.configuration.plain() for trial in outcome.trials] == [{"threads": 1}, {"threads": 2}]
    assert outcome.decision.configuration == Configuration({"threads": 2})
    assert outcome.decision.configuration.variables == {"OMP_NUM_THREADS": "2"}


def test_a_number_of_threads_that_gains_nothing_is_left_as_written() -> None:
    outcome = Study(threaded(64), facts(thread_counts=(1, 2)), ALL, Observer()).run()
    assert [trial.configuration.get("threads") for trial in outcome.trials] == [1, 2, *[None] * 18]
    assert "threads" not in outcome.decision.configuration


def test_few_trials_leave_threads_alone() -> None:
    outcome = Study(threaded(2), facts(thread_counts=(1, 2)), StudySettings(trials=3), Observer()).run()
    assert all("threads" not in trial.configuration for trial in outcome.trials)


@pytest.mark.parametrize(("gains", "kept"), [("model", "model"), ("blocks", "blocks"), ("neither", None)])
def test_cuda_graphs_are_tried_first_and_kept(gains: str, kept: str | None) -> None:
    job = SimulatedJob(computing=lambda c: {None: 1.0, gains: 0.6}.get(c.get("cuda_graphs"), 1.1))
    outcome = Study(job, facts(cuda_graphs=("model", "blocks")), ALL, Observer()).run()
    assert [t.configuration.get("cuda_graphs") for t in outcome.trials] == ["model", "blocks", *[kept] * 18]
    assert outcome.decision.configuration.get("cuda_graphs") == kept


@pytest.mark.parametrize(("gains", "kept"), [(8.0, 8.0), (2.0, 2.0), (0.0, None)])
def test_ways_to_cut_a_compiled_model_are_tried_first_and_kept(gains: float, kept: float | None) -> None:
    """Each turn compiles anew: no later trial has other pieces, and the finals take fewer turns."""
    uncapped = tuple(name for name in BY_NAME if name not in (*NOT_EVERYWHERE, "bucket_cap_mb", "bucket_cap_mb_list"))
    job = job_on("fast", computing=lambda c: {None: 1.0, gains: 0.6}.get(c.get("bucket_cap_mb"), 1.2))
    found = facts((*uncapped, "optimize_ddp"), compiles=True)
    outcome = Study(job, found, ALL, Observer()).run()
    assert [t.configuration.get("bucket_cap_mb") for t in outcome.trials] == [32.0, 8.0, 2.0, *[kept] * 17]
    assert outcome.decision.configuration.get("bucket_cap_mb") == kept
    assert outcome.decision.configuration.get("optimize_ddp") == (True if kept else None)
    assert len(outcome.baseline_rounds) <= 6


@pytest.mark.parametrize(("compiled", "semifinals"), [(False, 1), (True, 0)])
def test_no_semifinal_compiles_in_each_of_its_turns(compiled: bool, semifinals: int) -> None:
    job = job_on("fast", computing=lambda c: 0.1 if c.get("cuda_graphs") else 1.0, copies=0.0)
    found = facts(cuda_graphs=("reduce-overhead" if compiled else "model",))
    outcome = Study(job, found, StudySettings(trials=20, all_trials=True, allow=Rung.EXACT), Observer()).run()
    assert len(outcome.semifinals) == semifinals


def test_a_capture_that_fails_costs_its_trial_alone() -> None:
    def spoil(_index: int, configuration: Configuration) -> None:
        if configuration.get("cuda_graphs") == "model":
            raise TrialFailed("operation not permitted when stream is capturing")

    job = SimulatedJob(computing=lambda c: 0.6 if "cuda_graphs" in c else 1.0, spoil=spoil)
    outcome = Study(job, facts(cuda_graphs=("model", "blocks")), ALL, Observer()).run()
    assert [t.state for t in outcome.trials].count("failed") == 1
    assert outcome.decision.configuration["cuda_graphs"] == "blocks"


BOTH = {"interfaces": "eth0,eth1"}


def starts_in(job: SimulatedJob) -> int:
    """How often the script is started, if each change of the interfaces needs a start."""
    asked = [order.configuration.get("interfaces") for order in job.asked]
    return 1 + sum(one != other for one, other in itertools.pairwise(asked))


@pytest.mark.parametrize("seed", [0, *map(whole, (1, 2, 3))])
def test_a_setting_of_another_start_is_proved_in_turns(seed: int) -> None:
    job = job_on("slow", seed, links=lambda names: 1.9 if names else 1.0)
    outcome = Study(job, facts(nodes=2, start_settings=(BOTH,)), replace(ALL, seed=seed), Observer()).run()
    assert len(outcome.trials) <= 20
    assert outcome.decision.configuration["interfaces"] == "eth0,eth1"
    assert outcome.decision.configuration.variables == {"GLOO_SOCKET_IFNAME": "eth0,eth1"}
    assert starts_in(job) == 2 + ROUNDS  # the first, the trial, and one for each round
    for standing in outcome.ladder:
        true = job.cost(AS_WRITTEN) / job.cost(standing.configuration)
        assert standing.speedup.low * 0.99 <= true <= standing.speedup.high * 1.01


def test_a_setting_that_gains_nothing_costs_one_start() -> None:
    job = job_on("slow")
    outcome = Study(job, facts(nodes=2, start_settings=(BOTH,)), ALL, Observer()).run()
    assert starts_in(job) == 2
    assert "interfaces" in outcome.trials[-1].configuration
    assert all("interfaces" not in standing.configuration for standing in outcome.finalists)


def test_a_setting_that_does_not_start_is_tried_once() -> None:
    def spoil(index: int, configuration: Configuration) -> None:
        if "interfaces" in configuration:
            raise TrialFailed("the script did not get going")

    job = job_on("slow", spoil=spoil)
    outcome = Study(job, facts(nodes=2, start_settings=(BOTH,)), ALL, Observer()).run()
    failed = [trial for trial in outcome.trials if trial.state == "failed"]
    assert [trial.configuration.plain() for trial in failed] == [BOTH]
    assert "interfaces" not in outcome.decision.configuration
    assert outcome.decision.configuration


def test_a_start_that_ends_the_tuning_keeps_what_was_found() -> None:
    def spoil(index: int, configuration: Configuration) -> None:
        if "interfaces" in configuration:
            raise TuningOver("it never came back")

    job = job_on("slow", spoil=spoil)
    outcome = Study(job, facts(nodes=2, start_settings=(BOTH,)), ALL, Observer()).run()
    assert len(outcome.ladder) == 3
    assert outcome.decision.configuration


def test_where_a_finalist_failed_and_tuning_ended_by_itself_nothing_is_decided() -> None:
    """What ends tuning may have made the finalist fail, too."""

    def computing(configuration: Configuration) -> float:
        return 90.0 if configuration and configuration.rung is Rung.EXACT else 1.0

    before = job_on("slow", computing=computing)
    first = run(before, trials=2)
    winner, of_trials = first.decision.configuration, len(before.asked) - blocks_of_finals(first)
    rounds = 0

    def spoil(index: int, configuration: Configuration) -> None:
        nonlocal rounds
        rounds += index >= of_trials and configuration == AS_WRITTEN
        if rounds > 3:
            raise TuningOver("the script itself is to blame")
        _fail(index >= of_trials and configuration == winner)

    outcome = run(job_on("slow", computing=computing, spoil=spoil), trials=2)
    decision = outcome.decision
    assert winner.rung is Rung.NEAR
    assert [standing.rung for standing in outcome.ladder] == [Rung.EXACT]
    assert (decision.configuration, decision.is_open) == (AS_WRITTEN, True)
    assert decision.why.startswith("undecided: no significant gain ")
    assert decision.why.endswith("(the script itself is to blame)")


class Listening(Observer):
    def __init__(self) -> None:
        self.needed: list[float] = []

    def no_time_for_starts(self, needed: float) -> None:
        self.needed.append(needed)


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize(("restart", "is_tried"), [(20.0, True), (150.0, False)])
def test_no_start_is_made_that_can_prove_nothing(restart: float, is_tried: bool, by_length: bool) -> None:
    """Five starts prove a setting: with time for fewer of them, what they take would be lost."""
    more = {"length": lambda number: 10**6, "restart": restart, "by_length": by_length, "time": 300.0}
    job, heard = job_on("slow", links=lambda names: 1.9 if names else 1.0, **more), Listening()
    Study(job, facts(nodes=2, start_settings=(BOTH,)), StudySettings(trials=20), heard).run()
    assert (starts_in(job) > 1) is is_tried
    assert [needed > 5 * restart for needed in heard.needed] == ([] if is_tried else [True])


def test_the_budget_that_starts_need_is_longer_than_the_one_that_is_there() -> None:
    """Of what was spent before the last block not all was spent on blocks."""
    more = {"length": lambda number: 10**6, "restart": 13.0, "time": 80.0}
    job, heard = job_on("slow", links=lambda names: 1.9 if names else 1.0, **more), Listening()
    Study(job, facts(nodes=2, start_settings=(BOTH,)), StudySettings(trials=20), heard).run()
    assert [needed > 80.0 for needed in heard.needed] == [True]


def test_few_trials_need_no_other_start() -> None:
    job = job_on("slow", links=lambda names: 1.9 if names else 1.0)
    Study(job, facts(nodes=2, start_settings=(BOTH,)), StudySettings(trials=7), Observer()).run()
    assert starts_in(job) == 1


ONE, OTHER = {"nccl_algo": "Tree"}, {"nccl_buffer_bytes": 8388608}


@pytest.mark.parametrize(
    ("gains", "starts", "tried"),
    [
        ([0.97, 1.02], 1, []),  # hopeless: no start, and no trial is kept for them
        ([1.2, 0.9], 2, [ONE]),
        ([1.2, 1.4], 3, [OTHER, ONE]),
        ([0.0, 1.06], 2, [OTHER]),  # nothing arrives
        ([], 2, [ONE]),  # where nothing can be told, one start is enough
    ],
)
def test_the_communication_benchmark_rules_settings_out(gains, starts, tried) -> None:
    job = job_on("slow")
    study = Study(
        job,
        facts(nodes=2, start_settings=(ONE, OTHER)),
        ALL,
        Observer(),
        lambda settings: gains,
    )
    outcome = study.run()
    wanted = [Configuration(order.configuration).start_variables for order in job.asked]
    assert 1 + sum(one != other for one, other in itertools.pairwise(wanted)) == starts
    own = [dict(trial.configuration) for trial in outcome.trials if set(trial.configuration) & {*ONE, *OTHER}]
    assert [values for values in own if values in (ONE, OTHER)] == tried
    live = [trial for trial in outcome.trials if not set(trial.configuration) & {*ONE, *OTHER}]
    assert len(live) == (15 if tried else 20)
    assert [screened.gain for screened in outcome.screened] == sorted(gains, reverse=True) or not gains


@pytest.mark.parametrize(("gains", "is_tried"), [([], False), ([0.0], False), ([1.2], True)])
@pytest.mark.parametrize("setting", [{"nccl_p2p_level": "SYS"}, {"nccl_gdr_level": "SYS"}])
def test_what_may_lose_data_is_tried_only_where_its_sums_were_right(gains, is_tried, setting) -> None:
    """Where the GPUs have no room for the benchmark, nobody has looked at what arrives."""
    study = Study(job_on("slow"), facts(nodes=2, start_settings=(setting,)), ALL, Observer(), lambda settings: gains)
    assert (setting in [trial.configuration.plain() for trial in study.run().trials]) is is_tried


def test_a_setting_that_the_benchmark_cannot_see_is_tried_unseen() -> None:
    asked: list[object] = []

    def screen(settings):
        asked.extend(settings)
        return [0.9] * len(settings)

    job = job_on("slow")
    unseen = {"nccl_max_channels": 8}
    outcome = Study(job, facts(nodes=2, start_settings=(unseen, ONE)), ALL, Observer(), screen).run()
    assert asked == [ONE]
    assert unseen in [trial.configuration.plain() for trial in outcome.trials]


def test_no_headroom_no_screening() -> None:
    def screen(settings):
        raise AssertionError("nothing can be won")

    job = SimulatedJob(link_mib_per_second=1e7, latency=0.0, copies=0.3, noise=0.002)
    Study(job, facts(nodes=2, start_settings=(ONE,)), ALL, Observer(), screen).run()


def test_without_headroom_only_settings_that_are_not_for_the_link_are_tried() -> None:
    keeping = {"malloc": keeps_memory()}

    def screen(settings):
        raise AssertionError("nothing can be won on the link")

    job = SimulatedJob(link_mib_per_second=1e7, latency=0.0, copies=0.3, noise=0.002)
    there = facts(nodes=2, start_settings=(ONE, keeping))
    outcome = Study(job, there, ALL, Observer(), screen).run()
    assert [trial.configuration.plain() for trial in outcome.trials] == [keeping]
    assert "no trial was run" not in outcome.decision.why
    assert "too little, or not sure in further starts" in outcome.decision.why
    assert not outcome.decision.is_open  # else there is no recipe, and each start tunes again
    fast = SimulatedJob(1e7, 0.0, 0.002, copies=0.3, computing=lambda values: 0.7 if "malloc" in values else 1.0)
    outcome = Study(fast, there, ALL, Observer(), screen).run()
    assert outcome.decision.configuration.plain() == keeping
    assert outcome.decision.configuration.rung is Rung.EXACT


def test_each_hook_is_compared_once_and_the_ladder_has_its_error() -> None:
    def error(configuration: Configuration) -> GradientError:
        return error_of(
            0.003 if configuration["hook"] == "bf16" else 0.0003 if configuration["hook"] == "fp16" else 0.7
        )

    job = job_on("slow", error=error)
    outcome = run(job, trials=20, all_trials=True)
    compared = [Configuration(asked.configuration).hook for asked in job.asked if asked.compare]
    assert len(compared) == len(set(compared)) >= 3  # of PowerSGD's ranks only what may be launched
    for standing in outcome.ladder:
        assert standing.error == (None if standing.rung is Rung.EXACT else error(standing.configuration))


@pytest.mark.parametrize(
    ("guilty", "found", "why"),
    [
        ({"hook": "fp16"}, error_of(0.001, finite=False), "the hook makes NaN or Inf of finite gradients"),
        ({"hook": "bf16"}, error_of(0.05), "gradient error 5.00 %, above the near rung's limit of 2.00 %"),
        (
            {"hook": "powersgd", "powersgd_rank": 1},
            error_of(0.97),
            "gradient error 97.00 % of a sum over 4 steps, above the lossy rung's limit of 95.00 %",
        ),
    ],
)
def test_a_hook_beyond_its_limit_is_refused(guilty, found, why) -> None:
    bad = Configuration(guilty)
    job = job_on("slow", error=lambda configuration: found if configuration.hook == bad else error_of(0.001))
    outcome = run(job, trials=20, all_trials=True, allow=Rung.LOSSY)
    refused = [trial for trial in outcome.trials if trial.state == "refused"]
    assert [(trial.configuration.hook, trial.reason, trial.error) for trial in refused] == [(bad, why, found)]
    assert [standing.rung for standing in outcome.ladder] == list(GRADIENT_RUNGS)  # by the rung's other hooks
    assert all(standing.configuration.hook != bad for standing in outcome.finalists)
    assert all(trial.configuration.hook != bad for trial in outcome.trials if trial.usable)


def test_a_finalist_that_is_refused_is_followed_by_the_next_best_at_once() -> None:
    """No other semifinal, and no other final rounds, are made for it."""
    refused: list[Configuration] = []

    def error(configuration: Configuration) -> GradientError:
        """The first hook of the lossy rung is fine; refused is that of the finalist, which is compared later."""
        if configuration.get("powersgd_rank", 1) == 1:
            return error_of(0.001)
        refused.append(configuration.hook)
        return error_of(1.2 if configuration.hook == refused[0] else 0.001)

    job = job_on("slow", error=error, computing=lambda values: 1.0 if values.get("powersgd_rank", 1) == 1 else 0.7)
    outcome = run(job, trials=20, all_trials=True, allow=Rung.LOSSY)
    assert refused
    assert all(standing.configuration.hook != refused[0] for standing in outcome.finalists)
    assert outcome.decision.configuration.rung is Rung.LOSSY
    assert len(outcome.semifinals) == 1
    last = max(n for n, asked in enumerate(job.asked) if asked.compare)
    as_written = [asked for asked in job.asked[last:] if not asked.configuration and asked.reduce]
    assert len(as_written) == len(outcome.baseline_rounds)


def test_a_rung_all_of_whose_hooks_are_refused_leaves_its_trials_to_the_others() -> None:
    job = job_on("slow", error=lambda c: error_of(0.1) if c.rung is Rung.NEAR else error_of(0.5))
    outcome = run(job, trials=20, all_trials=True, allow=Rung.LOSSY)
    assert [standing.rung for standing in outcome.ladder] == [Rung.EXACT, Rung.LOSSY]
    assert sum(trial.state == "refused" for trial in outcome.trials) == 2
    assert len(outcome.trials) == 20


def test_the_limits_are_the_users() -> None:
    job = job_on("slow", error=lambda c: error_of(0.1))
    outcome = run(job, trials=20, all_trials=True, limits={Rung.NEAR: 0.2, Rung.LOSSY: 0.05})
    assert {trial.configuration.rung for trial in outcome.trials if trial.state == "refused"} == {Rung.LOSSY}


def test_several_steps_become_one_on_top_of_what_is_allowed() -> None:
    knobs = (*facts().knobs, "accumulate_steps")
    outcome = run(job_on("slow"), knobs, trials=20, all_trials=True, accumulate_up_to=4)
    steps = [record.configuration.steps_per_update for record in outcome.trials]
    assert len(steps) <= 20
    assert [count for count in steps if count > 1] == [4, 2]  # last, the most first
    launched = outcome.decision.configuration
    assert (launched.rung, launched.gradient_rung, launched.steps_per_update) == (Rung.BATCH, Rung.NEAR, 4)
    assert [standing.rung for standing in outcome.ladder] == list(Rung)
    assert "(near, up to 4 steps in one)" in outcome.decision.why
    assert "the batch is 4 times as large" in outcome.decision.why


def test_own_buffers_are_tried_on_top_of_what_is_allowed_and_of_what_is_exact() -> None:
    """Where no hook can be set, the near rung has nothing else, and nothing is compared for a gradient error."""
    knobs = (*facts().knobs, "broadcast_buffers")
    for has_hook, allow in ((True, Rung.NEAR), (False, Rung.NEAR), (True, Rung.EXACT)):
        job = job_on("slow" if has_hook else "fast", computing=lambda c: 0.7 if "broadcast_buffers" in c else 1.0)
        outcome = run(
            job, knobs if has_hook else ("bucket_cap_mb", "broadcast_buffers"), trials=20, all_trials=True, allow=allow
        )
        tried = [record.configuration for record in outcome.trials if "broadcast_buffers" in record.configuration]
        by_hook = has_hook and allow is Rung.NEAR
        assert [bool(configuration.hook) for configuration in tried] == ([True, False] if by_hook else [False])
        assert tried == [record.configuration for record in outcome.trials][-len(tried) :]
        assert all(configuration.rung is Rung.NEAR for configuration in tried)
        launched = outcome.decision.configuration
        assert launched.get("broadcast_buffers", True) is (allow is Rung.EXACT)
        near = next(standing for standing in outcome.ladder if standing.rung is Rung.NEAR)
        assert (near.error is None) is not bool(near.configuration.hook)


@pytest.mark.parametrize(("offered", "up_to"), [(True, 1), (False, 4)])
def test_a_larger_batch_is_only_tried_where_asked_for_and_possible(offered: bool, up_to: int) -> None:
    knobs = (*facts().knobs, *(["accumulate_steps"] * offered))
    outcome = run(job_on("slow"), knobs, trials=12, all_trials=True, accumulate_up_to=up_to)
    assert len(outcome.trials) == 12
    assert all(record.configuration.steps_per_update == 1 for record in outcome.trials)


def test_no_more_trials_than_were_asked_for() -> None:
    knobs = (*facts().knobs, "accumulate_steps", "broadcast_buffers")
    assert len(run(job_on("slow"), knobs, trials=1, accumulate_up_to=2).trials) == 1


def test_steps_in_one_are_timed_together() -> None:
    knobs = (*facts().knobs, "accumulate_steps")
    job = job_on("slow")
    run(job, knobs, trials=8, accumulate_up_to=8)
    of_eight = [order for order in job.asked if order.configuration.get("accumulate_steps") == 8]
    assert of_eight
    assert all(order.at_once == 8 for order in of_eight)
    assert all(order.at_once == 1 for order in job.asked if "accumulate_steps" not in order.configuration)


@pytest.mark.parametrize("rounds", [2, 3])
def test_tuning_that_ends_in_the_finals_decides_by_three_rounds_or_not_at_all(rounds: int) -> None:
    whole = Study(job_on("slow", noise=0.08), facts(), StudySettings(trials=6), Observer()).run()
    assert len(whole.baseline_rounds) > 3
    finalists = len(whole.finalists) + 1  # and the baseline
    total = whole_blocks = 0

    def spoil(index: int, configuration: Configuration) -> None:
        nonlocal total
        total += 1
        if total > whole_blocks:
            raise TuningOver("the disk is full")

    asked = job_on("slow", noise=0.08)
    Study(asked, facts(), StudySettings(trials=6), Observer()).run()
    whole_blocks = len(asked.asked) - blocks_of_finals(whole) + rounds * finalists + 1
    study = Study(job_on("slow", noise=0.08, spoil=spoil), facts(), StudySettings(trials=6), Observer())
    outcome = study.run()
    assert outcome.ended == "the disk is full"
    assert outcome.trials == whole.trials
    assert outcome.decision.is_open is (outcome.decision.configuration == AS_WRITTEN)
    if rounds < 3:
        assert (outcome.ladder, outcome.decision.configuration) == ((), AS_WRITTEN)
        assert outcome.decision.why.startswith("undecided: in its trial ")
    else:
        assert len(outcome.baseline_rounds) == rounds
        assert outcome.decision.configuration in (AS_WRITTEN, whole.decision.configuration)
