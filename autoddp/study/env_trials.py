"""Tries env settings, which need another start of the script, with the best configuration of each rung.

They come last in a study. A short communication benchmark first rules out hopeless settings. A start of the script may
cost minutes, so each remaining setting gets one start. Only a setting that clearly gains is measured again, in rounds
in which starts with it and starts without it alternate.
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
"""Speed-up that a setting must show in its first start: less is not worth the starts that would prove it."""
ROUNDS = 4
"""Rounds in which starts with and starts without a setting alternate. Each round costs a start of the script. Four are
the fewest that can prove a gain of `CLEARLY`: their interval is six times their spread, see `finals.Finals.take`."""
_FRESH = 2  # additional warm-up steps: a fresh process is slow at first, because of allocators, page cache, TCP windows
RESERVED = 5
"""Trials kept for a setting: the script as written, the best of each rung, and the best with several buckets."""

Screen = Callable[[Sequence[Mapping[str, Value]]], "list[float]"]
"""Maps env settings to the speed-up of a step's reduction under each; returns an empty list where it cannot tell."""
Add = Callable[[Configuration, Sequence[Block], str], TrialRecord]


def screened(settings: Sequence[Mapping[str, Value]], screen: Screen) -> list[Screened]:
    """All settings with the benchmark's gain, where the benchmark can judge them; the most promising first."""
    seen = [setting for setting in settings if all(BY_NAME[name].on_the_link for name in setting)]
    gains = screen(seen) if seen else []
    known = {id(setting): gain for setting, gain in zip(seen, gains, strict=False)}
    found = [Screened(setting, known.get(id(setting))) for setting in settings]
    return sorted(found, key=lambda one: 1.0 if one.gain is None else one.gain, reverse=True)


@dataclass
class EnvTrials:
    """Runs the trials of env settings.

    `seconds` has the seconds per step of the configurations found so far, the script as written among them. `add`
    records a trial.
    """

    cost: Cost
    budget: StepBudget
    seconds: dict[Configuration, float]
    add: Add

    def run(self, settings: Sequence[Mapping[str, Value]]) -> dict[Configuration, list[Block]]:
        """Final rounds with the first setting that gains: a list of blocks, one a round, for each configuration.

        The configurations are those of `seconds`, without and with the setting. Empty if no setting gains.
        """
        for setting in settings:
            contenders = [known.with_values(**setting) for known in self.seconds]
            gains = []
            for known, new in zip(self.seconds, contenders, strict=True):
                gains.append(self._gain(known, new))
                if not gains[-1]:
                    break  # a setting that fails with one configuration would fail with the others
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
        """Measure with, without; without, with; and so on: no start is then needed between one round and the next."""
        known = list(self.seconds)
        expected = dict(zip(contenders, self.seconds.values(), strict=True)) | self.seconds
        blocks: dict[Configuration, list[Block]] = {c: [] for c in (*known, *contenders)}
        for number in range(ROUNDS):
            groups = (contenders, known) if number % 2 == 0 else (known, contenders)
            for configuration in (c for group in groups for c in group if c in blocks):
                try:
                    blocks[configuration].append(self._block(configuration, expected[configuration]))
                except TrialFailed:
                    del blocks[configuration]  # a configuration that ran before and fails now must not be launched
        return blocks if AS_WRITTEN in blocks else {}

    def _block(self, configuration: Configuration, expected: float) -> Block:
        steps = self.budget.block(expected, configuration.steps_per_update)
        return self.cost.block(configuration, self.budget.warmup_of(configuration) + _FRESH, steps)
