"""Predicts each trial before it is measured, learns from what is measured, and knows how far off it was."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence, Set

from autoddp.codec import replace
from autoddp.knobs import Configuration
from autoddp.knobs.hook import HOOK
from autoddp.predict import Calibration, Profile, computing_key
from autoddp.timing import median

_HOPELESS = 1.5  # times the seconds of the rung's best, beyond the errors made so far
_ENOUGH = 4  # trials that have been predicted and measured: before that nothing is left out
_ENOUGH_TO_TRUST, _RIGHT = 3, 0.05  # trials of which half are predicted as closely: then predictions may end a study
_ALIKE = 0.05  # of a logarithm: what is predicted closer together than that counts as equally fast


class Forecast:
    """Predicts the seconds of a job's steps; without a profile nothing is predicted.

    forecast = Forecast(profile, as_written=0.21)
    predicted = forecast.seconds(configuration)
    forecast.measured(configuration, 0.18, predicted)
    """

    def __init__(self, profile: Profile | None = None, as_written: float = 0.0) -> None:
        self._known = Calibration(profile, as_written) if profile else None
        self._computing = {""}
        self._hooks = {Configuration()}
        self.errors: list[float] = []
        """Relative error of each trial that was predicted."""
        self._errors_of: dict[str, list[float]] = defaultdict(list)

    @property
    def profile(self) -> Profile | None:
        """What was learned, with the errors made; None if nothing is known."""
        if self._known is None or not self.errors:
            return self._known.profile if self._known else None
        typical, large = median(self.errors), _percentile(self.errors, 0.9)
        return replace(self._known.profile, typical_error=typical, large_error=large)

    def is_trusted(self, hooks: Set[str]) -> bool:
        """Whether it has been right so far, in general and of configurations with one of these hooks; empty: none."""
        own = [error for hook in hooks or {""} for error in self._errors_of[hook]]
        enough = len(self.errors) >= _ENOUGH_TO_TRUST and median(self.errors) <= _RIGHT
        return enough and (not own or median(own) <= _RIGHT)

    def seconds(self, configuration: Configuration) -> float | None:
        """The predicted seconds of a step; None where that is not known.

        What threads, CPU binding and graphs do to computing is known only after the first trial with them.
        """
        if self._known is None or computing_key(configuration) not in self._computing:
            return None
        return self._known.seconds(configuration)

    def order(self, configurations: Sequence[Configuration]) -> list[int]:
        """The places of the configurations, the fastest first; those about equally fast stay in their order."""
        found = [self.seconds(configuration) for configuration in configurations]
        if None in found:
            return list(range(len(found)))
        return sorted(range(len(found)), key=lambda place: (round(math.log(found[place] or 1.0) / _ALIKE), place))

    def is_hopeless(self, configuration: Configuration, best: float) -> bool:
        """Whether a trial is not worth running, where the best of its rung takes `best` seconds.

        Only a configuration whose hook has been measured is judged, and only by a model that has been right so far.
        """
        predicted = self.seconds(configuration)
        if predicted is None or len(self.errors) < _ENOUGH or configuration.hook not in self._hooks:
            return False
        return predicted > _HOPELESS * (1 + _percentile(self.errors, 0.9)) * best

    def measured(self, configuration: Configuration, seconds: float, predicted: float | None) -> None:
        """A trial is over; `predicted` is what was said of it before."""
        if self._known is None or not 0 < seconds < math.inf:
            return
        if predicted is not None:
            self.errors.append(abs(predicted / seconds - 1))
            self._errors_of[str(configuration.get(HOOK.name, ""))].append(self.errors[-1])
        self._computing.add(computing_key(configuration))
        self._hooks.add(configuration.hook)
        self._known.measured(configuration, seconds)


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
