"""An answer at any moment: whatever ends a study, and however short the script is, what was measured decides."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from launchers import whole
from simulated import SimulatedJob, error_of, facts

from autoddp import codec
from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.study import Observer, Outcome, Study, StudySettings, TrialFailed, TuningOver
from autoddp.study.cost import Cost
from autoddp.wire import BlockDone

SLOW = {"link_mib_per_second": 22.0, "latency": 0.001}  # as 200 Mbit/s: a step of 1.1 s, of which 30 ms are computing


def run(job: SimulatedJob, **asked: object) -> Outcome:
    return Study(job, facts(), StudySettings(**{"trials": 20, **asked}), Observer()).run()


def gain(job: SimulatedJob, outcome: Outcome) -> float:
    """The true one, of what is launched."""
    return job.cost(AS_WRITTEN) / job.cost(outcome.decision.configuration)


def blocks_of_finals(outcome: Outcome) -> int:
    return len(outcome.baseline_rounds) + sum(len(standing.rounds) for standing in outcome.finalists)


@functools.cache
def of_an_endless_script(allow: Rung) -> float:
    job = SimulatedJob(**SLOW)
    return gain(job, run(job, allow=allow))


@pytest.mark.parametrize("allow", [Rung.NEAR, Rung.LOSSY])
@pytest.mark.parametrize("steps", [30, 60, whole(45), whole(120), whole(300)])
def test_a_short_script_reaches_what_a_long_one_does(steps: int, allow: Rung) -> None:
    """It is started again as needed, within five minutes."""
    job = SimulatedJob(**SLOW, length=lambda number: steps, restart=8.0, time=300.0)
    outcome = run(job, allow=allow)
    assert outcome.ended == ""
    assert gain(job, outcome) >= 0.9 * of_an_endless_script(allow)
    assert job.clock < 300.0


@pytest.mark.parametrize("steps", [15, 30, 60, 300, 2000, whole(45), whole(90), whole(120)])
def test_without_trials_asked_for_a_script_is_tuned_in_its_own_time(steps: int) -> None:
    """How long it is shows only at its end, so the first finals come early."""
    job = SimulatedJob(**SLOW, length=lambda number: steps, restart=8.0, by_length=True)
    outcome = run(job)
    own = max(30.0, steps * job.cost(AS_WRITTEN))
    assert job.clock < 1.1 * min(own, 300.0) + job.cost(AS_WRITTEN) * 8
    if steps >= 30:
        assert gain(job, outcome) >= 0.9 * of_an_endless_script(Rung.NEAR)
    else:
        assert outcome.decision.is_open
        assert outcome.decision.why.endswith("m would decide it")
    assert len(outcome.trials) >= (6 if steps >= 300 else 0)


def test_each_time_it_is_taken_to_be_longer_there_is_more_time() -> None:
    """Else a study that lacks the time for another start of the script would ask for ever."""
    job = SimulatedJob(length=lambda number: 10**6, restart=60.0, by_length=True)
    cost = Cost(job)
    cost.block(AS_WRITTEN, 1, 3)
    left = cost.left
    while cost.take_longer(1.0):
        assert cost.left > left
        left = cost.left
    assert left > 250.0


@pytest.mark.timeout(60)
def test_a_script_that_takes_long_to_start_is_tuned_without_trials_asked_for() -> None:
    """Its steps are short, so the final rounds need more of them than it has made so far: another start, perhaps."""
    job = SimulatedJob(2000.0, length=lambda number: 10**6, restart=60.0, by_length=True)
    outcome = run(job)
    assert outcome.trials
    assert job.clock < 330.0


def test_threads_are_tried_once_there_is_time_for_them() -> None:
    """Steps of 1.85 s: the headroom uses up the half minute that the script is taken to last at first."""
    job = SimulatedJob(
        computing=lambda values: 30.0 if values.get("threads") == 2 else 60.0,
        length=lambda number: 10**6,
        restart=8.0,
        by_length=True,
    )
    outcome = Study(job, facts(thread_counts=(2,)), StudySettings(trials=20), Observer()).run()
    assert outcome.decision.configuration.get("threads") == 2
    assert job.clock < 330.0


def test_settings_of_computing_are_tried_where_the_script_goes_on() -> None:
    """A step of 1.5 s that hardly communicates: the first half minute is over before anything is tried."""

    def computing(configuration: Configuration) -> float:
        return 25.0 if configuration.get("threads") == 4 else 50.0

    job = SimulatedJob(
        20000.0, latency=1e-5, noise=1e-4, copies=0.0, computing=computing, length=lambda number: 10**6, by_length=True
    )
    outcome = Study(job, facts(thread_counts=(4,)), StudySettings(trials=20), Observer()).run()
    assert gain(job, outcome) > 1.9
    assert job.clock < 300.0


@pytest.mark.parametrize("seed", [0, 1, *map(whole, range(2, 12))])
def test_the_blocks_of_a_round_come_from_one_start(seed: int) -> None:
    """Also where the script ends at another step in each start."""
    lengths = random.Random(seed)
    job = SimulatedJob(**SLOW, length=lambda number: 20 + lengths.randrange(40), time=600.0, seed=seed)
    outcome = run(job, allow=Rung.LOSSY, trials=6)
    rounds = list(zip(outcome.baseline_rounds, *(one.rounds for one in outcome.finalists), strict=False))
    assert len(rounds) >= 3
    # The blocks that count are the last ones of their round; what a start has cut off was measured again.
    by_seconds = dict(zip((block.seconds for block in job.blocks), job.starts, strict=True))
    assert all(len({by_seconds[block.seconds] for block in one}) == 1 for one in rounds)
    assert job.starts[-1] > 0
    assert gain(job, outcome) > 5


@pytest.mark.parametrize(("time", "steps"), [(35.0, 70), (35.0, 75), (40.0, 75)])
def test_what_gains_is_proved_before_the_script_can_end(time: float, steps: int) -> None:
    """Nobody knows how long its first start is: more trials would leave no time for the finals in another one."""
    job = SimulatedJob(**SLOW, length=lambda number: steps, restart=13.0, time=time)
    outcome = run(job)
    assert gain(job, outcome) > 1.9
    assert job.starts[-1] <= 1


def test_once_there_is_an_answer_trials_go_on() -> None:
    """A start takes most of the time there is, so the first gain is proved at once; the script never ends."""
    job = SimulatedJob(**SLOW, length=lambda number: 10**6, restart=60.0, time=100.0)
    outcome = run(job, all_trials=True)
    first = next(t.number for t in outcome.trials if t.seconds < 0.6 * job.cost(AS_WRITTEN) and t.usable)
    assert len(outcome.trials) > first + 3
    assert gain(job, outcome) > 1.9


def test_a_start_of_few_steps_is_enough_for_what_matters_most() -> None:
    """Nine steps: a round with all contenders would never be whole, so only what may be launched takes part."""
    job = SimulatedJob(**SLOW, length=lambda number: 15, time=1000.0)
    outcome = run(job, trials=6)
    assert Rung.LOSSY in {trial.configuration.rung for trial in outcome.trials}
    assert {one.rung for one in outcome.finalists} == {Rung.NEAR}
    assert outcome.length == 15
    assert outcome.decision.configuration.rung is Rung.NEAR


def asked_by(job: SimulatedJob, **asked: object) -> int:
    run(job, **asked)
    return len(job.asked)


def test_whatever_ends_a_study_leaves_an_answer() -> None:
    """At every other measurement: paired rounds alone launch, and nothing that was measured is lost."""
    why = "a host is lost"
    undisturbed = run(SimulatedJob(**SLOW, noise=0.07), trials=4)
    assert len(undisturbed.baseline_rounds) > 3
    for last in range(0, asked_by(SimulatedJob(**SLOW, noise=0.07), trials=4), 2):

        def spoil(index: int, _configuration: Configuration, last: int = last) -> None:
            if index >= last:
                raise TuningOver(why)

        job = SimulatedJob(**SLOW, noise=0.07, spoil=spoil)
        if last < 4:  # the script as written is not known yet
            with pytest.raises(TuningOver, match=why):
                run(job, trials=4)
            continue
        outcome = run(job, trials=4)
        assert outcome.trials == undisturbed.trials[: len(outcome.trials)]
        assert len(job.asked) == last + 1
        assert outcome.ended == why
        rounds = len(outcome.baseline_rounds)
        assert outcome.decision.is_open is (outcome.decision.configuration == AS_WRITTEN)
        assert rounds >= 3 or outcome.decision.is_open


def test_a_rank_that_dies_in_the_finals_costs_its_round() -> None:
    """The script is started again: what the round has measured before that is measured again beside the rest."""
    died: list[int] = []

    def spoil(index: int, configuration: Configuration) -> None:
        if len(died) < 1 and index > of_trials and configuration == AS_WRITTEN:
            died.append(index)
            job._ended.append(10**6)  # another start
            raise TrialFailed("rank 1 killed by SIGABRT")

    before = SimulatedJob(**SLOW, length=lambda number: 10**6)
    outcome = run(before, trials=4)
    of_trials = len(before.asked) - blocks_of_finals(outcome)
    job = SimulatedJob(**SLOW, length=lambda number: 10**6, spoil=spoil)
    again = run(job, trials=4)
    assert died
    assert again.decision.configuration == outcome.decision.configuration != AS_WRITTEN
    assert len(again.baseline_rounds) == len(outcome.baseline_rounds)


def test_undecided_is_not_no_gain() -> None:
    """Where time was short, the answer says what would decide it; where nothing gains, that is what it says."""
    short = run(SimulatedJob(**SLOW, length=lambda number: 60, time=18.0))
    assert short.decision.is_open
    assert short.decision.why.startswith(("undecided: ", "there was no time for a trial"))
    assert short.decision.why.endswith("m would decide it")
    nothing = run(SimulatedJob(500.0, latency=0.05), trials=4, allow=Rung.EXACT)
    assert not nothing.decision.is_open
    assert nothing.decision.why.startswith("no significant gain within what you allow (exact)")


def test_what_there_was_no_time_to_try_is_not_said_to_gain_nothing() -> None:
    """Half of a step could be saved by 16 bits, and a closed answer would have kept each later start from trying."""
    late: list[int] = []

    def spoil(index: int, configuration: Configuration) -> None:
        if configuration != AS_WRITTEN and not late:  # from here on another program takes the time
            late.append(index)
            job.clock = job.time - 20.0

    job = SimulatedJob(**SLOW, time=1000.0, spoil=spoil)
    outcome = run(job, trials=6)
    assert {trial.configuration.rung for trial in outcome.trials} == {Rung.EXACT}
    assert len(outcome.baseline_rounds) >= 3
    assert outcome.decision.is_open
    why = outcome.decision.why
    assert why.startswith("undecided: nothing that was tried gains, and near was not tried: your settings stay; head")
    assert why.endswith("m would decide it")


def test_where_a_gain_does_not_show_in_a_few_rounds_of_a_busy_machine_nothing_is_decided() -> None:
    """16 bits save half of a step. "No gain" after three rounds kept each later start from finding out."""
    unlucky = 0
    for seed in range(20):
        outcome = run(SimulatedJob(**SLOW, noise=0.5, seed=seed, time=45.0), trials=4)
        assert outcome.decision.is_open is (outcome.decision.configuration == AS_WRITTEN), seed
        allowed = [one for one in outcome.ladder if Rung.NEAR.allows(one.rung)]
        if outcome.decision.is_open and allowed and all(one.speedup.ratio < 1 for one in allowed):
            unlucky += 1
            assert outcome.decision.why.startswith(f"undecided: {allowed[-1].rung.value} gives ×0."), seed
            assert outcome.decision.why.endswith("m would decide it"), seed
    assert unlucky


def test_where_there_was_time_for_one_trial_that_is_of_no_use_nothing_is_decided() -> None:
    """The answer named the budget that would decide it, and was saved as one that needs no more."""
    outcome = run(SimulatedJob(**SLOW, time=25.0, error=lambda configuration: error_of(0.5)))
    assert [trial.state for trial in outcome.trials] == ["refused"]
    assert outcome.decision.why.endswith("m would decide it")
    assert outcome.decision.is_open


@pytest.mark.parametrize("why", ["", "--budget 5 min 0 s is over"])
def test_threads_that_there_was_no_time_to_try_are_not_said_to_gain_nothing(why: str) -> None:
    """A step of 12 s that hardly communicates: twice as fast with other threads, and the headroom takes the time."""

    def computing(configuration: Configuration) -> float:
        return 200.0 if configuration.get("threads") == 4 else 400.0

    def spoil(_index: int, configuration: Configuration) -> None:
        if why and configuration != AS_WRITTEN:
            raise TuningOver(why)

    link = {"link_mib_per_second": 20000.0, "latency": 1e-5, "noise": 1e-4, "copies": 0.0}
    job = SimulatedJob(**link, computing=computing, time=1000.0 if why else 300.0, spoil=spoil)
    outcome = Study(job, facts(thread_counts=(4,)), StudySettings(trials=20), Observer()).run()
    assert outcome.headroom_interval[1] < 0.03
    assert not outcome.trials
    assert outcome.decision.is_open
    assert outcome.decision.why.startswith("there was no time for a trial: your settings stay; headroom up to ")
    assert outcome.decision.why.endswith("m would decide it")


class Evaluating(SimulatedJob):
    """The script evaluates, for as long as twenty steps, in the last step of measurement number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(**SLOW)
        self._at = at

    def __call__(self, *given: Any, **named: Any) -> BlockDone:
        done = super().__call__(*given, **named)
        if done.index != self._at or not done.seconds:
            return done
        self.clock += 20.0
        return codec.replace(done, seconds=(*done.seconds[:-1], done.seconds[-1] + 20.0))


def test_wherever_a_script_of_long_steps_evaluates_it_gets_its_gain() -> None:
    """A block has one or two of such steps: a round told nothing, and a rung was left for what its first trial met."""
    for at in range(asked_by(SimulatedJob(**SLOW))):
        job = Evaluating(at)
        outcome = run(job)
        launched = next(one for one in outcome.ladder if one.configuration == outcome.decision.configuration)
        assert gain(job, outcome) > 1.9, at
        assert launched.speedup.ratio == pytest.approx(gain(job, outcome), rel=0.05), at


@pytest.mark.parametrize("last", [9, 10, 13])
def test_what_ends_a_further_round_of_the_headroom_leaves_an_answer(last: int) -> None:
    """Four rounds are enough for one: a script that takes long to start may spend a budget on the others."""

    def spoil(index: int, _configuration: Configuration) -> None:
        if index >= last:
            raise TuningOver("the --budget of 3 min 0 s is over")

    job = SimulatedJob(20000.0, latency=1e-5, copies=0.0, noise=0.2, seed=3, spoil=spoil)
    outcome = run(job, trials=6)
    assert [order.reduce for order in job.asked] == [True, *(bool(number % 2) for number in range(last))]
    assert len(outcome.baseline.blocks) == (last - 1) // 2
    assert outcome.ended == "the --budget of 3 min 0 s is over"
    assert outcome.decision.is_open
    assert outcome.decision.why.startswith("there was no time for a trial: your settings stay; headroom up to ")
    assert outcome.decision.why.endswith("m would decide it")


@pytest.mark.parametrize(("allow", "trials"), [(Rung.EXACT, 3), (Rung.EXACT, 7), (Rung.NEAR, 20), (Rung.LOSSY, 6)])
def test_at_least_half_of_the_trials_may_be_launched(allow: Rung, trials: int) -> None:
    outcome = run(SimulatedJob(**SLOW), allow=allow, trials=trials, all_trials=True)
    assert len(outcome.trials) == trials
    for number in range(1, trials + 1):
        allowed = sum(allow.allows(trial.configuration.rung) for trial in outcome.trials[:number])
        assert 2 * allowed >= number


@pytest.mark.parametrize("when", ["in the trials", "in the finals"])
@pytest.mark.parametrize("times", [0.25, 4.0])
def test_a_link_that_changes_its_rate_is_decided_on_all_the_same(times: float, when: str) -> None:
    """Trials before and after cannot be compared; rounds can, because all of a round are measured at about one time."""
    undisturbed = SimulatedJob(**SLOW)
    found = run(undisturbed, trials=6)
    of_finals = blocks_of_finals(found)
    changes_at = len(undisturbed.asked) - (of_finals // 2 if when == "in the finals" else of_finals + 6)

    def spoil(index: int, _configuration: Configuration) -> None:
        if index == changes_at:
            job._link *= times

    job = SimulatedJob(**SLOW, spoil=spoil)
    outcome = run(job, trials=6)
    assert len(outcome.baseline_rounds) >= len(found.baseline_rounds)
    launched = outcome.decision.configuration
    assert launched == AS_WRITTEN or gain(job, outcome) > 1.05
