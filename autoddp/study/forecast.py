"""Predicts each trial before it is measured, learns from what is measured, and knows how far off it was."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence, Set

from autoddp.codec import replace
from autoddp.errors import first_line
from autoddp.knobs import Configuration
from autoddp.knobs.hook import HOOK
from autoddp.knobs.job import OWN_HOOK
from autoddp.predict import Profile, Unpredictable, computing_key, profile_of
from autoddp.predict.calibration import Calibration
from autoddp.timing import median
from autoddp.timing.timeline import Timeline
from autoddp.wire import JobFacts

_HOPELESS = 1.5  # times the seconds of the rung's best, beyond the errors made so far
_ENOUGH = 4  # trials that have been predicted and measured: before that nothing is left out
_ENOUGH_TO_TRUST, _RIGHT = 3, 0.05  # trials of which half are predicted as closely: then predictions may end a study
_ALIKE = 0.05  # of a logarithm: what is predicted closer together than that counts as equally fast
_NO_TIME = "tuning had no time to record its steps; tune again with a longer --budget"
_ONLY_THERE = "tune it where it is to run"


class Forecast:
    """Predicts the seconds of a job's steps; without a profile nothing is predicted.

    forecast = Forecast(profile, as_written=0.21)
    predicted = forecast.seconds(configuration)
    forecast.measured(configuration, 0.18, predicted)
    """

    def __init__(self, profile: Profile | None = None, as_written: float = 0.0, why_not: str = _NO_TIME) -> None:
        """`why_not`: why there is no profile, and what would mend that, in one line."""
        self.why_not = "" if profile else why_not
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


def forecast_of(facts: JobFacts, recorded: Sequence[Timeline], as_written: float, computing: float) -> Forecast:
    """The forecast for a job of which some steps were recorded; without a profile, it knows why nothing is predicted.

    `as_written` and `computing` are seconds of a step: of the script as written, and without any reduction.
    """
    why = why_never(facts)
    if why:
        return Forecast(why_not=why)
    try:
        profile = profile_of(
            recorded,
            shapes=facts.gradient_shapes,
            backend=facts.backend,
            nodes=facts.nodes,
            ddp_arguments=facts.ddp_arguments,
            computing=min(computing, as_written),
            link=facts.link,
            cores_per_rank=facts.cores / facts.ranks_per_host,
            reducing=facts.micro_batches,
            buffer_bytes=facts.buffer_bytes,
        )
        return Forecast(profile, as_written)
    except Unpredictable as unpredictable:
        return Forecast(why_not=str(unpredictable))
    except ValueError as problem:  # an argument of DDP, as text, from which its buckets cannot be told
        what = f"the script gives DDP sizes of buckets that cannot be read ({first_line(problem)})"
        return Forecast(why_not=f"{what}; {_ONLY_THERE}")


def why_never(facts: JobFacts) -> str:
    """Why the steps of a job with these facts cannot be predicted, and what would mend that; "" where they may be."""
    if "+" in facts.parameters_digest:
        return f"the script trains several DDP models, and only the steps of one can be predicted; {_ONLY_THERE}"
    if any(OWN_HOOK in why for why in facts.left_out.values()):
        return f"{OWN_HOOK}, and what that computes and sends is not known; {_ONLY_THERE}"
    if not facts.micro_batches:
        return "its steps reduce no gradients through DDP, so their time depends on no link; nothing is to be predicted"
    if facts.micro_batches % 1:
        return (
            f"its first steps differ in their number of reductions (on average {facts.micro_batches:g}), and only "
            "steps with the same number can be predicted; give each step as many micro-batches, and tune again"
        )
    return ""


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
