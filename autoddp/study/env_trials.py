"""Settings that need another start of the script: tried last, with the best of each rung, and judged start by start.

A short communication benchmark rules out the hopeless ones. A start of the script may cost minutes, so each of the
others gets one; only one that clearly gains is measured again, in rounds in which starts with it and starts without it
take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoddp.knobs import AS_WRITTEN, BY_NAME, Configuration, Value
from autoddp.study.budget import StepBudget
from autoddp.study.cost import Cost
from autoddp.study.measure import TrialFailed
from autoddp.study.outcome import Screened, TrialRecord
from autoddp.timing import Block

CLEARLY = 1.10
"""Times as fast as without the setting: less is not worth the starts that would prove it."""
ROUNDS = 4
"""In which starts with and without a setting take turns. Each costs a start of the script, and four are the fewest that
tell a gain of `CLEARLY`: the 99 % interval is then three times their spread."""
_FRESH = 2  # steps more to warm up: a fresh process is slow at first, because of allocators, page cache, TCP windows
RESERVED = 5
"""Trials kept for a setting: the script as written, each rung's best, and the best with several buckets."""

Screen = Callable[[Sequence[Mapping[str, Value]]], "list[float]"]
"""Start settings → how many times as fast a step's reduction is under each; an empty list where that cannot be told."""
Add = Callable[[Configuration, Sequence[Block], str], TrialRecord]


def screened(settings: Sequence[Mapping[str, Value]], screen: Screen) -> list[Screened]:
    """All settings, judged by the benchmark where that can see them, the most promising first."""
    seen = [setting for setting in settings if all(BY_NAME[name].on_the_link for name in setting)]
    gains = screen(seen) if seen else []
    known = {id(setting): gain for setting, gain in zip(seen, gains, strict=False)}
    found = [Screened(setting, known.get(id(setting))) for setting in settings]
    return sorted(found, key=lambda one: 1.0 if one.gain is None else one.gain, reverse=True)


@dataclass
class EnvTrials:
    """`seconds` are of the configurations found so far, the script as written among them; `add` keeps a trial."""

    cost: Cost
    budget: StepBudget
    seconds: dict[Configuration, float]
    add: Add

    def run(self, settings: Sequence[Mapping[str, Value]]) -> dict[Configuration, list[Block]]:
        """Blocks of final rounds, index for index: of what is known, and of it with the setting; {} for no gain."""
        for setting in settings:
            contenders = [known.with_values(**setting) for known in self.seconds]
            gains = []
            for known, new in zip(self.seconds, contenders, strict=True):
                gains.append(self._gain(known, new))
                if not gains[-1]:
                    break  # it fails, and would with the others
            if min(gains) > 0 and max(gains) >= CLEARLY:
                return self._rounds(contenders)
        return {}

    def _gain(self, known: Configuration, new: Configuration) -> float:
        try:
            block = self._block(new, self.seconds[known])
        except TrialFailed as failure:
            self.add(new, (), str(failure))
            return 0.0
        return self.seconds[known] / self.add(new, (block,), "").seconds

    def _rounds(self, contenders: Sequence[Configuration]) -> dict[Configuration, list[Block]]:
        """With, without; without, with; …: so that half of the turns need no start."""
        known = list(self.seconds)
        expected = dict(zip(contenders, self.seconds.values(), strict=True)) | self.seconds
        blocks: dict[Configuration, list[Block]] = {c: [] for c in (*known, *contenders)}
        for number in range(ROUNDS):
            groups = (contenders, known) if number % 2 == 0 else (known, contenders)
            for configuration in (c for group in groups for c in group if c in blocks):
                try:
                    blocks[configuration].append(self._block(configuration, expected[configuration]))
                except TrialFailed:
                    del blocks[configuration]  # it ran before and fails now: not to be launched
        return blocks if AS_WRITTEN in blocks else {}

    def _block(self, configuration: Configuration, expected: float) -> Block:
        steps = self.budget.block(expected, configuration.steps_per_update)
        return self.cost.block(configuration, self.budget.warmup_of(configuration) + _FRESH, steps)
