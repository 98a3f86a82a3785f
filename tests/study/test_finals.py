"""Final rounds: how many are made, who takes part in them, and that they call nothing faster that is not."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable

import pytest
from launchers import FROM_NOTHING
from replayed import OF_RUNG, answer_of, recorded

from autoddp.codec import replace
from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.settings import StudySettings
from autoddp.study import Observer, TuningOver
from autoddp.study.budget import StepBudget
from autoddp.study.cost import Cost
from autoddp.study.decision import decide
from autoddp.study.finals import Finals, ladder_of
from autoddp.study.reserve import Reserve
from autoddp.timing import LOOKS, Block, Headroom, speedup
from autoddp.wire import BlockDone

STEP = 0.1
SOME = Headroom(0.5, 0.4, 0.6)


class Machine:
    """A `study.Measure`: each rung is so many times as fast as the script as written, in steps that scatter."""

    def __init__(
        self, noise: float = 0.01, seed: int = 0, seconds: float = 1e9, turns: int = 10**9, **times: float
    ) -> None:
        self._times, self._most = {"": 1.0, **times}, turns
        self._noise, self._random, self._left = noise, random.Random(seed), seconds
        self.turns: list[Configuration] = []

    def is_now(self, **times: float) -> None:
        """Rungs are so many times as fast from here on."""
        self._times |= times

    def __call__(self, configuration: Configuration, warmup: int, steps: int, **_more: object) -> BlockDone:
        if len(self.turns) == self._most:
            raise TuningOver("the disk is full")
        self.turns.append(configuration)
        true = STEP / self._times[configuration.rung.value if configuration else ""]
        together = self._random.gauss(0, self._noise)  # the steps of a block share their moment
        left = self._left
        self._left -= true * (warmup + steps)
        return BlockDone(len(self.turns), (true * 2.718**together,) * steps, warmup * true, 0.0, left=left)


def finals_of(machine: Machine, allow: Rung = Rung.NEAR, pace: float = 0.0) -> Finals:
    budget, cost, asked = StepBudget(STEP), Cost(machine), StudySettings(allow=allow)
    finals = Finals(cost, budget, Reserve(cost, budget), asked, Observer(), random.Random(0), {})
    finals.pace = pace
    contenders = list(OF_RUNG.values())
    with contextlib.suppress(TuningOver):
        finals.run(contenders, dict.fromkeys((AS_WRITTEN, *contenders), STEP))
    return finals


def launched(finals: Finals, allow: Rung = Rung.NEAR) -> Configuration:
    return decide(ladder_of(finals.paired.finalists), StudySettings(allow=allow), SOME).configuration


@pytest.fixture(scope="module")
def studies_of_nothing() -> list[tuple[bool, int, str]]:
    """A thousand studies of recorded steps, in which no configuration differs from another; a part but for --whole."""
    traces, shuffle = recorded(), random.Random(1)
    names = sorted(traces)
    count = 1000 if FROM_NOTHING in os.environ else 360
    answers = [answer_of(traces[names[number % len(names)]], shuffle) for number in range(count)]
    return [(answer.launches, answer.rounds, answer.end) for answer in answers]


def test_there_are_thirty_recordings() -> None:
    assert len(recorded()) >= 30
    assert min(map(len, recorded().values())) >= 100


def test_where_nothing_gains_nothing_is_launched(studies_of_nothing: list[tuple[bool, int, str]]) -> None:
    """False launches: at most 15 of a thousand. The seed is fixed, so this says the same each time."""
    assert sum(launches for launches, _, _ in studies_of_nothing) <= 0.015 * len(studies_of_nothing)


def test_where_nothing_gains_a_study_ends(studies_of_nothing: list[tuple[bool, int, str]]) -> None:
    rounds = sorted(rounds for _, rounds, _ in studies_of_nothing)
    assert rounds[-1] <= 12
    ends = Counter(end for _, _, end in studies_of_nothing)
    assert ends["no gain"] > ends["undecided"]


def test_a_large_gain_takes_three_rounds() -> None:
    finals = finals_of(Machine(exact=1.0, near=1.9, lossy=1.0))
    assert len(finals.paired.rounds) == LOOKS[0]
    assert launched(finals) == OF_RUNG[Rung.NEAR]


@pytest.mark.parametrize("seed", range(5))
def test_a_small_gain_takes_more_and_no_gain_ends_early(seed: int) -> None:
    small = finals_of(Machine(0.03, seed, exact=1.12, near=1.0, lossy=1.0), Rung.EXACT)
    assert launched(small, Rung.EXACT) == OF_RUNG[Rung.EXACT]
    assert len(small.paired.rounds) > LOOKS[0]
    nothing = finals_of(Machine(0.01, seed, exact=1.0, near=1.0, lossy=1.0))
    assert launched(nothing) == AS_WRITTEN
    assert nothing.paired.is_settled
    assert len(nothing.paired.rounds) <= 5


def test_what_is_not_allowed_rides_along_for_three_rounds() -> None:
    machine = Machine(0.04, exact=1.1, near=1.2, lossy=3.0)
    finals = finals_of(machine, Rung.EXACT)
    turns = Counter(machine.turns)
    assert turns[OF_RUNG[Rung.NEAR]] == turns[OF_RUNG[Rung.LOSSY]] == LOOKS[0] < turns[AS_WRITTEN]
    assert turns[AS_WRITTEN] == turns[OF_RUNG[Rung.EXACT]]
    assert launched(finals, Rung.EXACT) == OF_RUNG[Rung.EXACT]
    why = decide(ladder_of(finals.paired.finalists), StudySettings(allow=Rung.EXACT), SOME).why
    assert "; --allow lossy " in why


def test_no_step_outruns_the_loaders() -> None:
    """A turn lives on batches that wait in queues: near is 1.9 times as fast in it, and 1.25 times once launched."""
    finals = finals_of(Machine(exact=1.2, near=1.9, lossy=1.0), pace=0.8 * STEP)
    gains = {standing.rung: standing.speedup.ratio for standing in finals.paired.finalists}
    assert gains[Rung.NEAR] == pytest.approx(1.25, rel=0.03)
    assert launched(finals) == OF_RUNG[Rung.EXACT]  # 4 % more are too little for a change of training


def test_what_can_no_longer_win_leaves() -> None:
    """Exact gains nothing, so only near runs on until it is sure."""
    machine = Machine(0.02, seed=3, exact=0.95, near=1.12, lossy=1.0)
    finals = finals_of(machine)
    turns = Counter(machine.turns)
    assert turns[OF_RUNG[Rung.EXACT]] < turns[OF_RUNG[Rung.NEAR]] == turns[AS_WRITTEN]
    assert launched(finals) == OF_RUNG[Rung.NEAR]


class Stumbling(Machine):
    """Some configurations take five times as long in the fourth round. `ran`: in which rounds each one did."""

    def __init__(self, stumbles: Callable[[Configuration], bool], **times: float) -> None:
        super().__init__(0.002, **times)
        self._stumbles = stumbles
        self.number = 1
        self.ran: dict[Configuration, list[int]] = {}

    def __call__(self, configuration: Configuration, warmup: int, steps: int, **more: object) -> BlockDone:
        self.ran.setdefault(configuration, []).append(self.number)
        done = super().__call__(configuration, warmup, steps, **more)
        times = 5 if self.number == 4 and configuration and self._stumbles(configuration) else 1
        return replace(done, seconds=tuple(times * second for second in done.seconds))


@pytest.mark.parametrize(
    ("stumbles", "times"),
    [
        (lambda one: "hook" in one, {"exact": 1.2, "near": 1.5, "lossy": 1.6}),  # and exact was surely slower before
        (lambda one: "hook" not in one, {"exact": 1.2, "near": 1.0, "lossy": 1.28}),  # and another exact one has left
    ],
)
def test_no_block_is_paired_with_another_round(
    stumbles: Callable[[Configuration], bool], times: dict[str, float]
) -> None:
    machine = Stumbling(stumbles, **times)
    budget, cost, asked = StepBudget(STEP), Cost(machine), StudySettings(allow=Rung.LOSSY)

    class Follows(Observer):
        def final(self, number: int, planned: int) -> None:
            machine.number = number + 1

    finals = Finals(cost, budget, Reserve(cost, budget), asked, Follows(), random.Random(0), {})
    contenders = [*OF_RUNG.values(), Configuration({"bucket_cap_mb": 4.0})]
    finals.run(contenders, dict.fromkeys((AS_WRITTEN, *contenders), STEP))
    assert any(machine.ran[one][-1] == 3 for one in contenders)
    assert machine.ran[AS_WRITTEN][-1] > 4
    for standing in finals.paired.finalists:
        assert machine.ran[standing.configuration] == list(range(1, len(standing.rounds) + 1))


class TwoTasks(Machine):
    """Steps of one task take twice as long as those of the other. In three rounds exact has more short ones."""

    def __call__(self, configuration: Configuration, warmup: int, steps: int, **more: object) -> BlockDone:
        done = super().__call__(configuration, warmup, steps, **more)
        is_lucky = configuration == OF_RUNG[Rung.EXACT] and Counter(self.turns)[configuration] <= 3
        lengths = (1, 1, 2) if is_lucky else (1, 2) if self._random.random() < 0.5 else (2, 1)
        return replace(done, seconds=tuple(second * lengths[n % len(lengths)] for n, second in enumerate(done.seconds)))


def test_rounds_of_two_lengths_that_agree_by_luck_are_no_gain() -> None:
    """Their medians say ×1.5 three times, with next to no spread."""
    finals = finals_of(TwoTasks(0.002, exact=1.0, near=1.0, lossy=1.0), Rung.EXACT)
    assert launched(finals, Rung.EXACT) == AS_WRITTEN
    assert len(finals.paired.rounds) > LOOKS[0]
    gains = finals_of(TwoTasks(0.002, exact=20.0, near=1.0, lossy=1.0), Rung.EXACT)
    assert launched(gains, Rung.EXACT) == OF_RUNG[Rung.EXACT]


class InTurn(Machine):
    """Every second or third step takes three times as long, as one that also trains a second network."""

    def __init__(self, turn: int, steps: int) -> None:
        super().__init__(0.002, exact=1.2, near=1.0, lossy=1.0)
        self._turn, self._steps = turn, steps

    def __call__(self, configuration: Configuration, warmup: int, steps: int, **more: object) -> BlockDone:
        done = super().__call__(configuration, warmup, steps, **more)
        lengths = [3 if n % self._turn == 0 else 1 for n in range(self._steps)]
        return replace(done, seconds=tuple(done.seconds[0] * length for length in lengths))


@pytest.mark.parametrize(("turn", "steps"), [(3, 12), (3, 8), (3, 9), (2, 10), (2, 14), (2, 20)])
def test_a_gain_of_steps_whose_lengths_come_in_turn_is_sure(turn: int, steps: int) -> None:
    finals = finals_of(InTurn(turn, steps), Rung.EXACT)
    assert launched(finals, Rung.EXACT) == OF_RUNG[Rung.EXACT]


def test_a_busy_machine_leaves_it_undecided() -> None:
    finals = finals_of(Machine(0.5, seed=2, exact=1.1, near=1.1, lossy=1.1))
    assert len(finals.paired.rounds) == LOOKS[-1]
    assert not finals.paired.is_settled
    assert launched(finals) == AS_WRITTEN


def test_rounds_end_when_what_was_kept_back_is_spent() -> None:
    finals = finals_of(Machine(0.5, seed=2, seconds=9.0, exact=1.1, near=1.1, lossy=1.1))
    assert LOOKS[0] <= len(finals.paired.rounds) < LOOKS[-1]
    assert not finals.paired.is_settled


def test_tuning_that_ends_within_a_round_decides_by_the_whole_ones() -> None:
    """Near is sure after three rounds; whether exact gains too is open when tuning ends."""
    machine = {"noise": 0.02, "seed": 1, "exact": 1.1, "near": 1.9, "lossy": 1.0}
    uncut = finals_of(Machine(**machine, turns=3 * 4))
    assert len(uncut.paired.rounds) == 3
    assert launched(uncut) == OF_RUNG[Rung.NEAR]
    two = finals_of(Machine(**machine, turns=3 * 4 - 1))
    assert (two.paired.rounds, launched(two)) == ((), AS_WRITTEN)


def test_finals_that_are_made_again_share_the_error() -> None:
    finals = finals_of(Machine(exact=1.0, near=1.9, lossy=1.0))
    assert {standing.tests for standing in finals.paired.finalists} == {2}  # exact and near may be launched
    contenders = [OF_RUNG[Rung.NEAR]]
    finals.run(contenders, dict.fromkeys((AS_WRITTEN, *OF_RUNG.values()), STEP))
    assert {standing.tests for standing in finals.paired.finalists} == {4}


class Wavering(Machine):
    """In each three rounds everything but the script as written is found 4 % too slow, 4 % too fast, and right."""

    def __call__(self, configuration: Configuration, warmup: int, steps: int, **more: object) -> BlockDone:
        done = super().__call__(configuration, warmup, steps, **more)
        if not configuration:
            return done
        times = 2.718 ** (0.04, -0.04, 0.0)[Counter(self.turns)[configuration] % 3]
        return replace(done, seconds=tuple(second * times for second in done.seconds))


def test_what_was_proved_stays_where_finals_that_are_made_again_are_cut_off() -> None:
    """They have half of the error, so three rounds that were enough before prove nothing the second time."""
    finals = finals_of(Wavering(noise=0.0, turns=2 * 3 * 4, exact=1.5, near=1.0, lossy=1.0), Rung.EXACT)
    assert launched(finals, Rung.EXACT) == OF_RUNG[Rung.EXACT]
    proved = finals.paired
    assert len(proved.rounds) == 3
    with contextlib.suppress(TuningOver):
        finals.run([OF_RUNG[Rung.EXACT]], dict.fromkeys((AS_WRITTEN, *OF_RUNG.values()), STEP))
    assert finals.paired is proved
    assert launched(finals, Rung.EXACT) == OF_RUNG[Rung.EXACT]


def test_what_was_proved_stays_where_as_many_rounds_find_the_same() -> None:
    """Three rounds prove 4 %. With half of the error they do not, and for less than 5 % no more rounds are made."""
    machine = Machine(0.0005, exact=1.04, near=1.0, lossy=1.0)
    finals = finals_of(machine, Rung.EXACT)
    assert len(finals.paired.rounds) == LOOKS[0]
    for times, stays in ((1.04, OF_RUNG[Rung.EXACT]), (0.97, AS_WRITTEN)):  # in the end it is slower
        machine.is_now(exact=times)
        finals.run([OF_RUNG[Rung.EXACT]], dict.fromkeys((AS_WRITTEN, *OF_RUNG.values()), STEP))
        assert launched(finals, Rung.EXACT) == stays


def test_what_was_proved_stays_where_it_had_no_room_in_finals_that_are_made_again() -> None:
    machine = Machine(0.0005, exact=1.0, near=1.5, lossy=1.0)
    finals = finals_of(machine)
    proved, other = finals.paired, Configuration({"hook": "fp16"})
    finals._that_fit = lambda finalists, expected: [other]  # type: ignore[method-assign]
    machine.is_now(near=1.0)
    finals.run([other], dict.fromkeys((AS_WRITTEN, *OF_RUNG.values(), other), STEP))
    assert finals.paired is proved


class Alternating(Machine):
    """Once it is busy, everything but the script as written is found by turns 40 % faster and 40 % slower."""

    busy = False

    def __call__(self, configuration: Configuration, warmup: int, steps: int, **more: object) -> BlockDone:
        done = super().__call__(configuration, warmup, steps, **more)
        if not configuration or not self.busy:
            return done
        times = 1 / 1.4 if Counter(self.turns)[configuration] % 2 else 1.4
        return replace(done, seconds=tuple(second * times for second in done.seconds))


def test_what_was_proved_and_had_no_room_stays_where_all_rounds_leave_another_one_open() -> None:
    machine = Alternating(0.0005, exact=1.0, near=1.5, lossy=1.0)
    finals = finals_of(machine)
    proved, other = finals.paired, Configuration({"hook": "fp16"})
    assert launched(finals) == OF_RUNG[Rung.NEAR]
    finals._that_fit = lambda finalists, expected: [other]  # type: ignore[method-assign]
    machine.is_now(near=1.0)
    machine.busy = True
    finals.run([other], dict.fromkeys((AS_WRITTEN, *OF_RUNG.values(), other), STEP))
    assert Counter(machine.turns)[other] == LOOKS[-1]
    assert finals.paired is proved


def test_other_rounds_take_their_place_only_if_something_new_would_be_launched() -> None:
    finals = finals_of(Machine(exact=1.0, near=1.9, lossy=1.0))
    before = finals.paired
    setting = Configuration({"hook": "bf16", "threads": 2})
    rounds = [Block((STEP,)), Block((1.01 * STEP,)), Block((STEP,)), Block((0.99 * STEP,))]
    faster = [Block((block.median / 3,)) for block in rounds]
    finals.take({AS_WRITTEN: rounds, setting: rounds})
    assert finals.paired is before
    finals.take({AS_WRITTEN: rounds, OF_RUNG[Rung.NEAR]: faster, setting: rounds})
    assert finals.paired is before
    finals.take({AS_WRITTEN: rounds, OF_RUNG[Rung.NEAR]: rounds, setting: faster})
    assert launched(finals) == setting


def test_rounds_that_share_starts_have_to_show_more() -> None:
    """Four rounds of five starts: by Student's t alone this setting would be launched."""
    finals = finals_of(Machine(exact=1.0, near=1.0, lossy=1.0))
    setting = Configuration({"threads": 2})
    as_written = [Block((STEP,)), Block((STEP,)), Block((STEP,)), Block((STEP,))]
    gains = [Block((STEP / gain,)) for gain in (1.10, 1.14, 1.10, 1.07)]
    assert speedup([STEP] * 4, [block.median for block in gains]).sure
    finals.take({AS_WRITTEN: as_written, setting: gains})
    assert launched(finals) == AS_WRITTEN


@pytest.mark.parametrize(("step", "timed"), [(0.005, 20), (0.04, 10), (0.25, 3), (1.0, 1)])
def test_the_script_as_written_gets_as_long_a_block_as_what_gains(step: float, timed: int) -> None:
    """It is one side of every comparison, so a few short steps would make all intervals wide."""
    budget = StepBudget(step)
    assert budget.turn(AS_WRITTEN, step)[1] == timed
    gains = Configuration({"hook": "bf16"})
    assert timed * step >= 0.5 * min(0.4, budget.turn(gains, step * 0.45)[1] * step * 0.45)
