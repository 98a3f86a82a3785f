"""Tells a fault of the script itself from one of what is tried: it comes at the same step, whatever is in effect."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoddp.knobs import Configuration, Rung
from autoddp.wire import AS_IT_IS, Measure


@dataclass(frozen=True)
class _Fault:
    configuration: Configuration
    measured: int
    """Measurements that this start of the script had given before."""

    def shows_with(self, other: _Fault) -> bool:
        """Whether the two have nothing in common but the script's step."""
        settings = (self.configuration, other.configuration)
        is_exact = any(one.rung is Rung.EXACT for one in settings)
        return self.measured != other.measured and settings[0] != settings[1] and is_exact


@dataclass
class OwnFaults:
    """Knows the failures of all starts of the script.

    What a setting spoils fails once it is in effect, so it may fail at the same step of each start: of both, their
    first measurement has failed. Where other steps came before, it is the script's step that they have in common.
    At least one of the two settings computes exactly what the script does; loss of precision may come out at a step.
    """

    why: str = ""
    """Why the script itself seems to be to blame for what has failed last; "" if it does not."""
    _seen: dict[tuple[int, str], list[_Fault]] = field(default_factory=dict)

    def failed(self, order: Measure, measured: int, steps: int, cause: str) -> None:
        """Take a failure.

        `measured`: measurements that this start of the script had given before. `steps`: the script's, in this start;
        0 if nobody has told. `cause`: "rank N: " and what the rank's script has raised, or else how it ended.
        """
        rank, colon, raised = cause.partition(": ")
        if not (steps and order.reduce and order.experiment == AS_IT_IS and colon and rank.startswith("rank ")):
            return
        fault = _Fault(order.configuration, measured)
        before = self._seen.setdefault((steps, raised), [])
        is_own = any(map(fault.shows_with, before))
        before.append(fault)
        if is_own:
            same = f"after {steps} steps the script failed in the same way under different settings"
            self.why = f"{same}, so it seems to be to blame itself: {raised}"
