"""Whether another trial is worth its steps: trials end when nothing more is likely to come of them.

Each rung runs once. An allowed one goes on unless something else takes half of its time already: with each of its
hooks, as long as its best untried configuration is expected to beat what would be launched so far, and as long as it
leads and the last trials have brought something.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autoddp.knobs import Configuration, Rung
from autoddp.knobs.hook import HOOK
from autoddp.settings import StudySettings
from autoddp.study.forecast import Forecast
from autoddp.study.outcome import TrialRecord
from autoddp.study.space import Space

_LAST, _LITTLE = 4, 0.02  # trials that must have brought less than this before a rung is left
_EXPECTED = 0.01  # gain below which a trial is not worth its steps
_FAR = 2.0  # times the seconds of what would be launched: no setting of the same rung gains as much
_SPREAD = 0.02  # of the logarithm of a predicted step, where predictions are trusted


@dataclass(frozen=True)
class Likely:
    """An untried configuration, and what it is expected to gain, as a share; see `Prospects.best_untried`."""

    configuration: Configuration
    gain: float


class Prospects:
    """Judges whether further trials of one rung are worth it. `as_written`: seconds of a step as written."""

    def __init__(self, space: Space, asked: StudySettings, as_written: float) -> None:
        self._space = space
        self._asked = asked
        self._as_written = as_written

    def is_open(self, records: Sequence[TrialRecord], likely: Likely | None, has_guesses: bool) -> bool:
        """Whether another trial of this rung is worth running.

        `likely`: its `best_untried`; None where predictions are not to be trusted. `has_guesses`: whether one of those
        that are tried first is left.
        """
        best = min((one.seconds for one in records if one.configuration.rung is self._space.rung), default=None)
        if best is None:
            return True
        if best == math.inf:
            return has_guesses
        if best > _FAR * min(self._allowed(records)) or not self._asked.allow.allows(self._space.rung):
            return False
        if (likely.gain >= _EXPECTED) if likely else (has_guesses or self._missing(records)):
            return True
        return self._leads(records) is self._space.rung and self._last_gain(records) >= _LITTLE

    def best_untried(self, records: Sequence[TrialRecord], forecast: Forecast) -> Likely | None:
        """The untried configuration that is predicted to be the fastest; None where predictions are not trusted.

        Its gain is that over what would be launched so far. But as long as a hook that may be the rung's best has not
        run, it is one with such a hook, and its gain is that over the best of the rung.
        """
        if not forecast.is_trusted(self._space.hooks):
            return None
        tried = {trial.configuration for trial in records}
        space, of_rung = self._space, [t for t in records if t.usable and t.configuration.rung is self._space.rung]
        near = [space.configuration(guess) for guess in space.guesses()]
        if of_rung:
            near += space.around(min(of_rung, key=lambda trial: trial.seconds).configuration)
        predicted = {c: seconds for c in near if c and c not in tried and (seconds := forecast.seconds(c)) is not None}
        missing = self._missing(records)
        new = min((c for c in predicted if c.get(HOOK.name) in missing), key=predicted.__getitem__, default=None)
        if new is not None and of_rung:
            gain = expected_gain(min(trial.seconds for trial in of_rung), predicted[new])
            if gain >= _EXPECTED:
                return Likely(new, gain)
        best = min(predicted, key=predicted.__getitem__, default=None)
        return Likely(best, expected_gain(min(self._allowed(records)), predicted[best])) if best else None

    def _missing(self, records: Sequence[TrialRecord]) -> frozenset[str]:
        """The hooks that have not run yet."""
        return self._space.hooks - {str(trial.configuration.get(HOOK.name)) for trial in records}

    def _allowed(self, records: Sequence[TrialRecord]) -> list[float]:
        """Seconds of a step as written, and in each trial; infinite where it could not be launched."""
        allows = self._asked.allows
        return [self._as_written, *(t.seconds if allows(t.configuration) else math.inf for t in records)]

    def _leads(self, records: Sequence[TrialRecord]) -> Rung | None:
        """The rung of what would be launched so far; None: the script as written."""
        seconds = self._allowed(records)
        place = seconds.index(min(seconds))
        return records[place - 1].configuration.rung if place else None

    def _last_gain(self, records: Sequence[TrialRecord]) -> float:
        """What the last trials have brought, as a share of the best before them."""
        seconds = self._allowed(records)
        last = min(_LAST, len(records))
        return 1 - min(seconds) / min(seconds[: len(seconds) - last])


def expected_gain(best: float, predicted: float) -> float:
    """The expected improvement over `best` seconds, as a share of it, of a step that is predicted (Mockus, 1975).

    >>> round(expected_gain(0.100, 0.100), 3), round(expected_gain(0.100, 0.080), 2), expected_gain(0.1, 0.2) < 1e-9
    (0.008, 0.2, True)
    """
    away, normal = math.log(best / predicted) / _SPREAD, statistics.NormalDist()
    return normal.cdf(away) - predicted / best * math.exp(_SPREAD**2 / 2) * normal.cdf(away - _SPREAD)
