"""Final rounds: the script as written and the best of each rung take turns until it is clear what is launched.

Trials only rank: of twenty configurations that are all alike, the best looks 4 to 14 % faster. Here each round measures
every contender and the script as written once, in a new order, within one start of the script. What is not allowed
rides along for the first rounds only. Where each of them needs a start of its own, see `starts`.
"""

from __future__ import annotations

import math
import random
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoddp.knobs import AS_WRITTEN, Configuration, GradientError, Rung
from autoddp.recipe import best_allowed
from autoddp.recipe.decision import WORTH_A_CHANGE
from autoddp.settings import StudySettings
from autoddp.study.budget import StepBudget
from autoddp.study.cost import Cost
from autoddp.study.measure import TrialFailed
from autoddp.study.observer import Observer
from autoddp.study.outcome import WORTHWHILE, Standing
from autoddp.study.reserve import FEWEST_ROUNDS, Reserve
from autoddp.timing import LOOKS, Block, bound, likely, median, speedup

MOST_ROUNDS = LOOKS[-1]
"""Rounds after which a study is undecided."""
_MOST_DEAR_ROUNDS = 6  # the same where each turn may cost a compilation
_SHARE_OF_A_START = 2 / 3  # that a round may take, because rounds do not begin with a start
_OF_QUARTILES = 0.93  # standard error of the median of normal values, as a share of quartile distance / √count
_LONG = 8  # steps of a block: parts of shorter ones have equal medians by luck, too
_WHOLE_TURNS = (3, 4, 6)  # steps of a part, which are whole turns of 2, 3, 4 or 6 steps
_STARTS_OF_A_ROUND = 3  # a script that ends within each of them ends too often


@dataclass(frozen=True)
class Paired:
    """Blocks of the script as written, one a round, and the finalists. Each ran in the first rounds, or in all."""

    rounds: tuple[Block, ...] = ()
    finalists: tuple[Standing, ...] = ()
    is_settled: bool = True
    """Whether no further round was likely to change what is launched."""

    def without(self, configuration: Configuration) -> Paired:
        """The rounds with this configuration not among the finalists."""
        return replace(self, finalists=tuple(one for one in self.finalists if one.configuration != configuration))


class Rounds(ABC):
    """Final rounds, however they are measured; `paired` is what they have shown so far.

    `errors`: `Configuration.hook_with_error` → error of its gradients. `most`: rounds after which they end, whatever
    they have shown.
    """

    def __init__(
        self,
        asked: StudySettings,
        observer: Observer,
        errors: Mapping[Configuration, GradientError],
        most: int = MOST_ROUNDS,
    ) -> None:
        self._asked = asked
        self._observer = observer
        self._errors = errors
        self.most = most
        self._times = 0
        self.paired = Paired()
        self.pace = 0.0
        """Seconds in which the script's loaders give the batches of a step; 0.0 where they keep up."""
        self.failed: set[Configuration] = set()
        """What has failed in a round, though it ran in its trial; it must not be launched."""

    @abstractmethod
    def _that_fit(
        self, finalists: Sequence[Configuration], expected: Mapping[Configuration, float]
    ) -> list[Configuration]:
        """Finalists for whose rounds there is room."""

    @abstractmethod
    def _affords(self, running: Sequence[Configuration], expected: Mapping[Configuration, float]) -> bool:
        """Whether there is time for one more round of these."""

    @abstractmethod
    def _round(
        self,
        running: list[Configuration],
        blocks: dict[Configuration, list[Block]],
        expected: Mapping[Configuration, float],
    ) -> bool:
        """Measure each of `running` once, in random order; `_fails` for those that fail. Whether the round is whole."""

    def run(self, contenders: Sequence[Configuration], expected: Mapping[Configuration, float]) -> None:
        """Measure rounds of these and of the best so far, until the answer is clear or what was kept back is spent.

        `expected`: seconds per step of each of them and of the script as written. Rounds that are cut off leave what
        there was before, unless they have shown as much.
        """
        before, was = self.paired, [standing.configuration for standing in ladder_of(self.paired.finalists)]
        finalists = self._that_fit(list(dict.fromkeys([*contenders, *was])), expected)
        allowed = sum(self._asked.allows(configuration) for configuration in finalists)
        tests = max(1, allowed) * 2**self._times  # each time that finals are made, half of the error of the last time
        self._times += 1
        blocks: dict[Configuration, list[Block]] = {c: [] for c in (AS_WRITTEN, *finalists)}
        running = list(blocks)
        for number in range(1, self.most + 1):
            if number > FEWEST_ROUNDS and not self._affords(running, expected):
                break
            if len(running) < 2 or not self._round(running, blocks, expected):
                break
            if number in LOOKS:
                found = self._paired_of(blocks, tests)
                open_ones = self._open(found)
                found = replace(found, is_settled=not open_ones)
                shows_as_much = found.is_settled or number >= len(before.rounds)
                if shows_as_much and not self._loses(before, found):
                    self.paired = found
                # Who has left stays away: its next block would be paired with one of an earlier round.
                running = [AS_WRITTEN, *(c for c in open_ones if c in running)]
            self._observer.final(number, self.most)

    def _loses(self, before: Paired, found: Paired) -> bool:
        """Whether earlier finals have proved something, and `found` neither proves anything so far nor disproves that.

        Finals that are made again have half of the error, so as many rounds as before prove less, and of a gain below
        `WORTH_A_CHANGE` no more are made. After the last one they have shown all that can be shown, but for what had
        no room in them.
        """
        had, has = (self._chosen(ladder_of(one.finalists)) for one in (self.paired, found))
        if self.paired.rounds is not before.rounds or had is None or has is not None:
            return False
        again = next((one for one in found.finalists if one.configuration == had.configuration), None)
        least = 1.0 if had.rung is Rung.EXACT else WORTH_A_CHANGE
        return again is None or (len(found.rounds) < self.most and _likely_most(again, found) >= least)

    def _fails(
        self, configuration: Configuration, running: list[Configuration], blocks: dict[Configuration, list[Block]]
    ) -> None:
        """A configuration has failed in a round; the script as written may fail in one, and stays."""
        if configuration != AS_WRITTEN:
            self.failed.add(configuration)
            running.remove(configuration)
            del blocks[configuration]
            self.paired = self.paired.without(configuration)

    def _chosen(self, ladder: Sequence[Standing]) -> Standing | None:
        return best_allowed(ladder, self._asked.allow, self._asked.accumulate_up_to)

    def _paired_of(self, blocks: Mapping[Configuration, Sequence[Block]], tests: int) -> Paired:
        """What the rounds show, where `tests` configurations share the error."""
        rounds = tuple(blocks[AS_WRITTEN])
        ran = {c: tuple(found) for c, found in blocks.items() if c != AS_WRITTEN and len(found) > 1}
        return Paired(rounds, tuple(self._standing(c, rounds, found, tests) for c, found in ran.items()))

    def _standing(
        self, configuration: Configuration, rounds: Sequence[Block], blocks: tuple[Block, ...], tests: int
    ) -> Standing:
        before, after = _medians(rounds[: len(blocks)], self.pace), _medians(blocks, self.pace)
        error = self._errors.get(configuration.hook_with_error)
        spread = _least_spread(rounds[: len(blocks)], blocks, self.pace)
        gain, least = speedup(before, after, bound(len(blocks), tests), spread), likely(before, after)[0]
        seconds = median(after)
        return Standing(configuration, seconds, gain, blocks, error, likely_low=least, tests=tests, pace=self.pace)

    def _open(self, paired: Paired) -> list[Configuration]:
        """The allowed finalists that more rounds are needed of: empty where the answer is clear."""
        ladder = [one for one in ladder_of(paired.finalists) if self._asked.allows(one.configuration)]
        chosen = self._chosen(ladder)
        found = [one.configuration for one in ladder if one != chosen and self._may_be_launched(one, chosen, paired)]
        return [chosen.configuration, *found] if chosen and found else found

    @staticmethod
    def _may_be_launched(one: Standing, chosen: Standing | None, paired: Paired) -> bool:
        """Whether it may yet turn out to be what is launched, in the place of what would be launched now."""
        if _likely_most(one, paired) < WORTH_A_CHANGE:
            return False
        if chosen is None:
            return True
        if one.rung.order < chosen.rung.order:  # it would be launched unless the other one is surely worth the change
            return not one.speedup.sure and chosen.speedup_low_over[one.rung] < WORTH_A_CHANGE
        together = min(len(one.rounds), len(chosen.rounds))
        before, after = (_medians(side.rounds[:together], one.pace) for side in (chosen, one))
        return likely(before, after)[1] >= WORTH_A_CHANGE


class Finals(Rounds):
    """Final rounds of a running job: all blocks of a round come from one start of the script.

    `turns_are_dear`: whether each turn may cost a compilation.
    """

    def __init__(
        self,
        cost: Cost,
        budget: StepBudget,
        reserve: Reserve,
        asked: StudySettings,
        observer: Observer,
        shuffle: random.Random,
        errors: Mapping[Configuration, GradientError],
        turns_are_dear: bool = False,
    ) -> None:
        super().__init__(asked, observer, errors, _MOST_DEAR_ROUNDS if turns_are_dear else MOST_ROUNDS)
        self._cost = cost
        self._budget = budget
        self._reserve = reserve
        self._random = shuffle

    def run(self, contenders: Sequence[Configuration], expected: Mapping[Configuration, float]) -> None:
        """See `Rounds.run`."""
        self._cost.phase = "finals"
        super().run(contenders, expected)

    def take(self, blocks: Mapping[Configuration, Sequence[Block]]) -> None:
        """Take rounds of other starts if by them something else would be launched.

        Neighbouring rounds share a start on one side, so they are more alike than independent ones, and Student's t
        would be wrong 5 times as often as it says. A bound twice as far out makes up for that.
        """
        found, before = self._paired_of(blocks, 1), {standing.configuration for standing in self.paired.finalists}
        chosen = self._chosen(ladder_of(found.finalists))
        if chosen is not None and chosen.configuration not in before:
            self.paired = found

    def _affords(self, running: Sequence[Configuration], expected: Mapping[Configuration, float]) -> bool:
        return self._reserve.affords([(c, expected[c]) for c in running])

    def _that_fit(
        self, finalists: Sequence[Configuration], expected: Mapping[Configuration, float]
    ) -> list[Configuration]:
        """Finalists for whose rounds there is time, and whose rounds fit into a start of the script.

        What may be launched and clearly gained in its trial comes first, the best of each rung before the others. A
        single one is tried however little time is left.
        """
        as_written, chosen = expected[AS_WRITTEN], list[Configuration]()
        least = as_written * (1 - WORTHWHILE)
        places = {c: [one for one in finalists if one.rung is c.rung].index(c) for c in finalists}

        def need(configuration: Configuration) -> tuple[bool, bool, int, float]:
            seconds = expected[configuration]
            return not self._asked.allows(configuration), seconds > least, places[configuration], seconds

        for configuration in sorted(finalists, key=need):
            together = [(c, expected[c]) for c in (*chosen, configuration)]
            steps = sum(self._reserve.steps_of_turn(*one) for one in (*together, (AS_WRITTEN, as_written)))
            room = self._cost.steps_of_a_start * (_SHARE_OF_A_START if chosen else 1.0)
            if steps <= room and (self._reserve.can_pay(together) or not chosen):
                chosen.append(configuration)
        return [c for c in finalists if c in chosen]

    def _round(
        self,
        running: list[Configuration],
        blocks: dict[Configuration, list[Block]],
        expected: Mapping[Configuration, float],
    ) -> bool:
        """Measure each of `running` once, in random order; remove those that fail.

        All blocks of a round come from one start of the script: where it ends within the round, or a rank dies, those
        before are measured again. Returns whether the round is whole.
        """
        found: dict[Configuration, tuple[int, Block]] = {}
        missing = self._random.sample(running, len(running))
        for _ in range(_STARTS_OF_A_ROUND):
            for configuration in missing:
                try:
                    turn = self._budget.turn(configuration, expected[configuration])
                    before = [block.median for block in blocks[configuration]]
                    block = self._cost.undisturbed(configuration, *turn, median(before or [expected[configuration]]))
                    found[configuration] = self._cost.start.number, block
                except TrialFailed:
                    found.pop(configuration, None)
                    self._fails(configuration, running, blocks)
            missing = [c for c in running if c not in found or found[c][0] != self._cost.start.number]
            if not missing:
                for configuration, (_, block) in found.items():
                    blocks[configuration].append(block)
                return True
        return False


def ladder_of(finalists: Sequence[Standing]) -> tuple[Standing, ...]:
    """The fastest finalist of each rung by its paired rounds, exact first, each compared with all milder rungs.

    One that has left the rounds does not take the place of one that has stayed.
    """
    best: list[Standing] = []
    for rung in Rung:
        of_rung = [standing for standing in finalists if standing.rung is rung]
        if of_rung:
            fastest = max(of_rung, key=lambda standing: (len(standing.rounds), standing.speedup.ratio))
            best.append(replace(fastest, speedup_low_over={other.rung: _low_over(fastest, other) for other in best}))
    return tuple(best)


def _low_over(standing: Standing, other: Standing) -> float:
    together = min(len(standing.rounds), len(other.rounds))
    before, after = (_medians(one.rounds[:together], standing.pace) for one in (other, standing))
    spread = _least_spread(other.rounds[:together], standing.rounds[:together], standing.pace)
    return speedup(before, after, bound(together, standing.tests) if standing.tests else None, spread).low


def _least_spread(before: Sequence[Block], after: Sequence[Block], pace: float) -> float:
    """What rounds scatter by at least, on a logarithmic scale, where the steps within a round differ so much.

    Steps of two lengths, as of two tasks that come by chance, may give the same two medians in three rounds by luck.
    Student's t would take the ratio of the lengths for a sure gain.
    """
    of_rounds = zip(_medians(before, pace), _medians(after, pace), strict=True)
    moments = [math.log(b * a) / 2 for b, a in of_rounds]  # what both sides have of a round, such as its noise
    return math.hypot(_error_of_median(before, moments, pace), _error_of_median(after, moments, pace))


def _error_of_median(blocks: Sequence[Block], moments: Sequence[float], pace: float) -> float:
    """The standard error of a block's median, or less.

    It is half of what the quartiles of all steps let expect, so it hardly counts where steps differ a little. Steps in
    which the script saves are fewer than a quarter, and move no quartile. Where lengths come in a regular turn, parts
    of a long block that hold whole turns have the median of all of it, and what they differ by says less.
    """
    of_blocks = zip(blocks, moments, strict=True)
    steps = [math.log(max(second, pace)) - moment for block, moment in of_blocks for second in block.seconds]
    low, _, high = statistics.quantiles(steps, n=4)
    by_quartiles = _OF_QUARTILES * (high - low) / math.sqrt(len(steps) / len(blocks)) / 2
    shortest = min(len(block.seconds) for block in blocks)
    lengths = [length for length in _WHOLE_TURNS if max(_LONG, 2 * length) <= shortest]
    return min([by_quartiles, *(_error_by_parts(blocks, length, pace) for length in lengths)])


def _error_by_parts(blocks: Sequence[Block], length: int, pace: float) -> float:
    """The error of a block's median by how far its first two parts, of so many steps each, are from the whole.

    The shorter a part is, the more its median scatters around that of the block, which holds it.
    """
    apart = [
        math.log(max(median(part), pace) / max(block.median, pace)) ** 2 / (len(block.seconds) / length - 1)
        for block in blocks
        for part in (block.seconds[:length], block.seconds[length : 2 * length])
    ]
    return math.sqrt(statistics.fmean(apart))


def _likely_most(one: Standing, paired: Paired) -> float:
    """What its speed-up over the script as written likely is at most."""
    as_written = _medians(paired.rounds[: len(one.rounds)], one.pace)
    return likely(as_written, _medians(one.rounds, one.pace))[1]


def _medians(blocks: Sequence[Block], pace: float) -> list[float]:
    """Seconds of a step in each block, in the long run: no step outruns the loaders, though the few of a block may."""
    return [max(block.median, pace) for block in blocks]
