"""Which entry of a ladder is launched.

A study asks here for what it launches, and a saved recipe for what it launches under another `--allow`: so both decide
alike. The figures they need are all in the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from autoddp.knobs import Configuration, Rung

WORTH_A_CHANGE = 1.05
"""How much faster a step must surely be for training to be changed at all."""


class OnALadder(Protocol):
    """What is known of the best configuration of one rung. All figures are ratios; 1.0 is the same speed."""

    @property
    def configuration(self) -> Configuration:
        """The best of its rung."""

    @property
    def speedup_low(self) -> float:
        """Lower end of its speed-up over the user's settings."""

    @property
    def speedup_high(self) -> float:
        """Upper end of it."""

    @property
    def speedup_low_over(self) -> Mapping[Rung, float]:
        """Milder rung → lower end of the speed-up over the best of that rung, from rounds that both ran."""


Entry = TypeVar("Entry", bound=OnALadder)


def best_allowed(ladder: Sequence[Entry], allow: Rung, accumulate_up_to: int) -> Entry | None:
    """The entry that a user who allows `allow` and so many steps in one launches; None: their own settings stay.

        best_allowed(recipe.ladder, Rung.NEAR, accumulate_up_to=1)

    The exact rung is taken where it surely gains. A rung that changes training is taken only where it is surely
    `WORTH_A_CHANGE` times as fast as what could be launched in its place: the user's settings, and each milder rung
    that is allowed and surely faster than those.
    """
    allowed = [entry for entry in ladder if entry.configuration.allowed_by(allow, accumulate_up_to)]
    allowed.sort(key=lambda entry: entry.configuration.rung.order)
    worth_it = [entry for number, entry in enumerate(allowed) if _is_worth_it(entry, allowed[:number])]
    return worth_it[-1] if worth_it else None


def _is_worth_it(entry: OnALadder, milder: Sequence[OnALadder]) -> bool:
    if entry.configuration.rung is Rung.EXACT:
        return entry.speedup_low > 1.0
    gains = [entry.speedup_low, *(_low_over(entry, other) for other in milder if other.speedup_low > 1.0)]
    return all(gain > WORTH_A_CHANGE for gain in gains)


def _low_over(entry: OnALadder, other: OnALadder) -> float:
    """The lower end of the speed-up over `other`: by paired rounds, else what the two intervals leave for sure."""
    paired = entry.speedup_low_over.get(other.configuration.rung)
    return entry.speedup_low / other.speedup_high if paired is None else paired
