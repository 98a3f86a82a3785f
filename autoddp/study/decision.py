"""What to launch: the mildest rung that is as fast as any the user allows, and only if it surely beats the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoddp.knobs import AS_WRITTEN, Rung
from autoddp.knobs.micro_steps import larger_batch
from autoddp.study.outcome import Decision, Standing
from autoddp.study.plan import Plan
from autoddp.timing import speedup


def ladder_of(finalists: Sequence[Standing]) -> tuple[Standing, ...]:
    """The fastest finalist of each rung by its paired rounds, exact first."""
    best: list[Standing] = []
    for rung in Rung:
        of_rung = [standing for standing in finalists if standing.rung is rung]
        if of_rung:
            best.append(max(of_rung, key=lambda standing: standing.speedup.ratio))
    return tuple(best)


def decide(ladder: Sequence[Standing], plan: Plan, headroom: float) -> Decision:
    """A higher rung is taken only where it is surely faster than the one chosen below it, by its own paired rounds."""
    chosen: Standing | None = None
    for standing in ladder:
        if plan.allows(standing.configuration) and standing.speedup.sure and _surely_faster(standing, chosen):
            chosen = standing
    if chosen is None:
        why = f"no significant gain within what you allow ({plan.allowed}): your settings stay; headroom {headroom:.0%}"
        return Decision(AS_WRITTEN, why + _beyond(ladder, plan))
    why = f"the best of what you allow ({plan.allowed}): {chosen.speedup} against your settings"
    why += larger_batch(chosen.configuration.steps_per_update)
    return Decision(chosen.configuration, why + _beyond(ladder, plan))


def _surely_faster(standing: Standing, chosen: Standing | None) -> bool:
    if chosen is None:
        return True
    gain = speedup([b.median for b in chosen.rounds], [b.median for b in standing.rounds])
    return gain.sure


def _beyond(ladder: Sequence[Standing], plan: Plan) -> str:
    """What the user could have by allowing more."""
    beyond = [s for s in ladder if not plan.allows(s.configuration) and s.speedup.sure]
    if not beyond:
        return ""
    best = max(beyond, key=lambda standing: standing.speedup.ratio)
    return f"; --allow {best.rung.value} would give ×{_short(best.speedup.ratio)}"


def _short(ratio: float) -> str:
    return f"{ratio:.{max(0, 2 - math.floor(math.log10(ratio)))}f}"
