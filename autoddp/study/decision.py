"""What to launch: only what surely beats the baseline, and what changes training only where that is worth it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoddp.knobs import AS_WRITTEN, Rung
from autoddp.knobs.micro_steps import larger_batch
from autoddp.study.outcome import Decision, Standing
from autoddp.study.plan import Plan
from autoddp.timing import speedup

WORTH_A_CHANGE = 1.05
"""How much faster a step must surely be for training to be changed at all."""


def ladder_of(finalists: Sequence[Standing]) -> tuple[Standing, ...]:
    """The fastest finalist of each rung by its paired rounds, exact first."""
    best: list[Standing] = []
    for rung in Rung:
        of_rung = [standing for standing in finalists if standing.rung is rung]
        if of_rung:
            best.append(max(of_rung, key=lambda standing: standing.speedup.ratio))
    return tuple(best)


def decide(ladder: Sequence[Standing], plan: Plan, headroom: float) -> Decision:
    """A rung that changes training is taken only where it is surely worth it against every milder one, and yours."""
    chosen: Standing | None = None
    allowed = [standing for standing in ladder if plan.allows(standing.configuration)]
    for number, standing in enumerate(allowed):
        if _is_worth_it(standing, allowed[:number]):
            chosen = standing
    if chosen is None:
        why = f"no significant gain within what you allow ({plan.allowed}): your settings stay; headroom {headroom:.0%}"
        return Decision(AS_WRITTEN, why + _too_little(allowed, None) + _beyond(ladder, plan))
    why = f"the best of what you allow ({plan.allowed}): {chosen.speedup} against your settings"
    why += larger_batch(chosen.configuration.steps_per_update)
    return Decision(chosen.configuration, why + _too_little(allowed, chosen) + _beyond(ladder, plan))


def _is_worth_it(standing: Standing, milder: Sequence[Standing]) -> bool:
    """By the lower ends of the intervals, all from the same rounds. A milder rung need not be sure of its own gain."""
    if standing.rung is Rung.EXACT:
        return standing.speedup.sure
    medians = [block.median for block in standing.rounds]
    gains = [standing.speedup, *(speedup([block.median for block in other.rounds], medians) for other in milder)]
    return all(gain.low > WORTH_A_CHANGE for gain in gains)


def _too_little(allowed: Sequence[Standing], chosen: Standing | None) -> str:
    """What is faster and allowed, and yet not launched."""
    least = chosen.speedup.ratio if chosen else 1.0
    passed = [s for s in allowed if s is not chosen and s.speedup.sure and s.speedup.ratio > least]
    if not passed:
        return ""
    best = max(passed, key=lambda standing: standing.speedup.ratio)
    gives = f"; {best.rung.value} gives {best.speedup}, not surely 5 % more than every milder rung and your settings"
    return f"{gives}: too little for a change of training"


def _beyond(ladder: Sequence[Standing], plan: Plan) -> str:
    """What the user could have by allowing more."""
    beyond = [s for s in ladder if not plan.allows(s.configuration) and s.speedup.low > WORTH_A_CHANGE]
    if not beyond:
        return ""
    best = max(beyond, key=lambda standing: standing.speedup.ratio)
    return f"; --allow {best.rung.value} would give ×{_short(best.speedup.ratio)}"


def _short(ratio: float) -> str:
    return f"{ratio:.{max(0, 2 - math.floor(math.log10(ratio)))}f}"
