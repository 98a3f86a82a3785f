"""Adjusts the model of a step to what a study has measured of it: the most likely numbers, given guesses and steps.

    fitted = Calibration(profile)
    fitted.measured(Configuration({"bucket_cap_mb": 50}), 0.123)
    fitted.profile.coefficients

Every number of the model has a guess and a spread around it. Least squares over the logarithms weighs what was measured
against the guesses: one measured step of the script as written mostly tells what a byte costs, a step with many small
buckets the latency, a step with a hook what the hook computes.

What the model is then still off by is not all noise: a machine may become slower for a while, and a hook may cost what
no number of the model stands for. So each prediction is corrected by what trials shortly before it, with the same hook
or with the same buckets were off by (a Gaussian process over the logarithms).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoddp.codec import replace
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB, BUCKET_CAP_MB_LIST
from autoddp.predict.coefficients import Coefficients
from autoddp.predict.plan import Cuts, buckets
from autoddp.predict.profile import Profile
from autoddp.predict.step import Steps, coefficients_of, computing_key, predictable

_SPREADS = {
    "pace": 0.2,
    "latency": 1.0,
    "per_byte": 0.3,
    "sharing": 0.05,
    "burst": 2.0,
    "stretch": 1.0,
    "copying": 0.7,
    "rounding": 0.7,
    "low_rank": 0.7,
    "call": 0.7,
    "shape": 0.7,
    "wake": 1.0,
    "crowding": 1.5,
}
"""Number of `Coefficients` → spread of its logarithm around the guess; 1.0: three times as much is possible."""
_UNMEASURED_LINK = {"per_byte": 3.0}
"""Spreads in place of those above where neither `autoddp bench` nor a timeline has measured the link."""
_MEASURED_HOOKS = dict.fromkeys(("copying", "rounding", "low_rank", "call", "shape"), 0.4)
"""Spreads in place of those above where what hooks compute was measured."""
_COMPUTING_SPREAD = 0.1  # of how threads, binding and graphs change computing
_NOISE, _NOISE_AS_WRITTEN = 0.05, 0.03  # relative spread of a measured trial, and of the many steps as written
_DRIFT, _HOOK, _BUCKETS = 0.04, 0.05, 0.04
"""Spreads of what the model is off by: of a moment, of all trials with one hook, of those with one way to cut, too."""
_MOMENT = 4.0  # trials after which two moments have little in common
_OUTLIER = 2.0  # spreads from the model beyond which a measurement loses weight
_ROUNDS_AT_FIRST, _ROUNDS = 12, 2  # of the fit; later fits begin at the last one's result
_NUDGE = 0.02  # of a logarithm, for a derivative
_NEAR = 0.5  # of each logarithm: derivatives from there serve here too
_LONGEST = 1.5  # of a logarithm: no round of the fit changes a number more
_MOST = 10  # trials that a fit looks at, the newest; each costs a simulated step for each number
_MOST_BUCKETS = 150  # of a trial that a fit looks at, for the same reason


Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class _Seen:
    number: int
    configuration: Configuration
    seconds: float
    noise: float

    @cached_property
    def hook(self) -> object:
        """Equal in trials with one hook and the same knobs of it."""
        return tuple(self.configuration.hook.items())

    @cached_property
    def buckets(self) -> object:
        """Equal in trials with one way to cut."""
        return BUCKET_CAP_MB.of(self.configuration), BUCKET_CAP_MB_LIST.of(self.configuration)


class Calibration:
    """A profile whose coefficients follow what is measured."""

    def __init__(self, profile: Profile, as_written: float) -> None:
        self.profile = replace(profile, measured=as_written)
        self._steps = Steps(profile)
        self._guess = profile.coefficients
        self._spreads = dict(_SPREADS)
        if not profile.link_is_measured:
            self._spreads |= _UNMEASURED_LINK
        if profile.hooks_are_measured:
            self._spreads |= _MEASURED_HOOKS
        self._as_written = _Seen(0, AS_WRITTEN, as_written, _NOISE_AS_WRITTEN)
        self._seen: list[_Seen] = []
        self._number = 0
        self._off: list[float] = []
        self._slopes: dict[int, tuple[Numbers, Numbers]] = {}
        """Trial → the logarithms on which its step depends, and the derivatives of the step's logarithm there."""
        self._logs: dict[str, float] = {}
        """Number → its logarithm in the last fit; without one it is at its guess."""
        self._modelled: dict[int, tuple[bytes, float]] = {}
        """Trial → the logarithms on which its step depends, as they were after the last fit, and the step's there."""
        self._fit(_ROUNDS_AT_FIRST)

    def seconds(self, configuration: Configuration) -> float | None:
        """The predicted seconds of a step; None where the model does not know the configuration."""
        modelled = self._steps.seconds(configuration, self.profile.coefficients)
        return None if modelled is None else modelled * math.exp(self._correction(configuration))

    def _correction(self, configuration: Configuration) -> float:
        """The logarithm of how many times longer a step is likely to take than in the model."""
        here = _Seen(self._number + 1, configuration, 0.0, 0.0)
        weights = zip((self._as_written, *self._seen), self._off, strict=True)
        return math.fsum(_in_common(here, one) * weight for one, weight in weights)

    def measured(self, configuration: Configuration, seconds: float) -> None:
        """A step under this configuration takes `seconds`."""
        if not predictable(self.profile, configuration) or not 0 < seconds < math.inf:
            return
        self._number += 1
        cut = buckets(self.profile.gradients, self.profile.order, Cuts.of(self.profile.ddp_arguments, configuration))
        if len(cut) <= _MOST_BUCKETS:
            self._seen = [*self._seen, _Seen(self._number, configuration, seconds, _NOISE)][-_MOST:]
            self._fit(_ROUNDS)

    def _fit(self, rounds: int) -> None:
        seen = [self._as_written, *self._seen]
        keys = {key for one in seen if (key := computing_key(one.configuration))}
        names = [*self._spreads, *sorted(keys)]
        guesses = np.log([getattr(self._guess, name) if name in self._spreads else 1.0 for name in names])
        spreads = np.array([self._spreads.get(name, _COMPUTING_SPREAD) for name in names])
        logs = np.array([self._logs.get(name, guess) for name, guess in zip(names, guesses.tolist(), strict=True)])
        places_of = [_places(names, one.configuration) for one in seen]
        measured, noise = np.log([one.seconds for one in seen]), np.array([one.noise for one in seen])

        def modelled(one: _Seen, found: Coefficients) -> float:
            """The logarithm of a step's seconds; that of the measured ones where the model does not know them."""
            return math.log(self._steps.seconds(one.configuration, found) or one.seconds)

        def coefficients(values: Numbers) -> Coefficients:
            return self._coefficients(dict(zip(names, np.exp(values).tolist(), strict=True)))

        modelled_at: dict[bytes, Numbers] = {}

        def model(values: Numbers) -> Numbers:
            """The logarithm of each trial's seconds in the model."""
            at = values.tobytes()  # a round begins where the one before has ended
            if at not in modelled_at:
                there = coefficients(values)
                # A fit begins where the one before has ended: there only the new trial is to be simulated.
                known = (self._modelled.get(one.number, (b"", 0.0)) for one in seen)
                modelled_at[at] = np.array(
                    [
                        before if where == values[places].tobytes() else modelled(one, there)
                        for one, places, (where, before) in zip(seen, places_of, known, strict=True)
                    ]
                )
            return modelled_at[at]

        def off(values: Numbers) -> Numbers:
            """How many spreads of its noise each measurement is above the model."""
            found: Numbers = (measured - model(values)) / noise
            return found

        def slopes(values: Numbers) -> Numbers:
            """The derivatives of `off`. A step depends on some of the numbers only."""
            found = np.zeros((len(seen), len(names)))
            for row, one, places, here in zip(found, seen, places_of, model(values), strict=True):
                at, known = self._slopes.get(one.number, (values[places] + 1.0, values))
                if np.abs(at - values[places]).max() > _NEAR:
                    nudged = (values + _NUDGE * (np.arange(len(names)) == place) for place in places)
                    known = np.array([(modelled(one, coefficients(there)) - here) / _NUDGE for there in nudged])
                    self._slopes[one.number] = values[places], known
                row[places] = -known / one.noise
            return found

        for _ in range(rounds):
            logs = _better(logs, guesses, spreads, off, slopes)
        self._logs = dict(zip(names, logs.tolist(), strict=True))
        self._modelled = {
            one.number: (logs[places].tobytes(), log)
            for one, places, log in zip(seen, places_of, model(logs).tolist(), strict=True)
        }
        self.profile = replace(self.profile, coefficients=coefficients(logs))
        shared = [[_in_common(one, other) + (one is other) * one.noise**2 for other in seen] for one in seen]
        self._off = np.linalg.solve(shared, off(logs) * noise).tolist()

    def _coefficients(self, values: dict[str, float]) -> Coefficients:
        computing = {name: value for name, value in values.items() if name not in self._spreads}
        return replace(self._guess, **{name: values[name] for name in self._spreads}, computing=computing)


def _in_common(one: _Seen, other: _Seen) -> float:
    """The covariance of what the model is off by, in two trials."""
    found = _DRIFT**2 * math.exp(-abs(one.number - other.number) / _MOMENT)
    if one.hook == other.hook:
        found += _HOOK**2
        if one.buckets == other.buckets:
            found += _BUCKETS**2
    return found


def _places(names: Sequence[str], configuration: Configuration) -> list[int]:
    """The places of those names on which a step under this configuration depends."""
    read = coefficients_of(configuration) | {computing_key(configuration)}
    return [place for place, name in enumerate(names) if name in read]


def _better(
    logs: Numbers,
    guesses: Numbers,
    spreads: Numbers,
    off: Callable[[Numbers], Numbers],
    slopes: Callable[[Numbers], Numbers],
) -> Numbers:
    """One round of Gauss and Newton, halved until the sum of squares falls; unchanged if it does not."""

    def cost(values: Numbers) -> float:
        return float(np.square(_tamed(off(values))).sum() + np.square((values - guesses) / spreads).sum())

    tamed = _tamed(off(logs))
    is_far = np.abs(off(logs)) > _OUTLIER
    weights = 1 - is_far * (1 - _OUTLIER / 2 / np.maximum(np.abs(tamed), _OUTLIER))  # the derivative of `_tamed`
    by = slopes(logs) * weights[:, None]
    matrix = by.T @ by + np.diag(1 / spreads**2)
    step = np.linalg.solve(matrix, -tamed @ by - (logs - guesses) / spreads**2).clip(-_LONGEST, _LONGEST)
    before = cost(logs)
    for halvings in range(4):
        tried: Numbers = logs + step / 2**halvings
        if cost(tried) < before:
            return tried
    return logs


def _tamed(off: Numbers) -> Numbers:
    """Measurements near the model as they are, those far away smaller: an outlier has less weight."""
    return np.copysign(np.minimum(np.abs(off), _OUTLIER * np.sqrt(np.abs(off) / _OUTLIER)), off)
