"""The ladder of a study, and its decision in words. What is launched of a ladder is decided in `recipe.decision`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoddp.knobs import AS_WRITTEN, GRADIENT_RUNGS, Rung
from autoddp.knobs.micro_batches import larger_batch
from autoddp.recipe import best_allowed
from autoddp.recipe.decision import WORTH_A_CHANGE
from autoddp.settings import StudySettings
from autoddp.study.outcome import Decision, Standing
from autoddp.timing import Headroom, speedup


def ladder_of(finalists: Sequence[Standing]) -> tuple[Standing, ...]:
    """The fastest finalist of each rung by its paired rounds, exact first, each compared with all milder ones."""
    best: list[Standing] = []
    for rung in Rung:
        of_rung = [standing for standing in finalists if standing.rung is rung]
        if of_rung:
            fastest = max(of_rung, key=lambda standing: standing.speedup.ratio)
            best.append(replace(fastest, speedup_low_over={other.rung: _low_over(fastest, other) for other in best}))
    return tuple(best)


def _low_over(standing: Standing, other: Standing) -> float:
    before, after = ([block.median for block in one.rounds] for one in (other, standing))
    return speedup(before, after).low


def decide(ladder: Sequence[Standing], asked: StudySettings, headroom: Headroom) -> Decision:
    """What is launched of a ladder as `ladder_of` gives it, and why."""
    chosen = best_allowed(ladder, asked.allow, asked.accumulate_up_to)
    allowed = [standing for standing in ladder if asked.allows(standing.configuration)]
    if chosen is None:
        configuration = AS_WRITTEN
        why = f"no significant gain within what you allow ({asked.allowed}): your settings stay; headroom {headroom}"
    else:
        configuration = chosen.configuration
        why = f"the best of what you allow ({asked.allowed}): {chosen.speedup} against your settings"
        why += larger_batch(configuration.steps_per_update)
    why += _too_little(allowed, chosen)
    beyond = _beyond(ladder, asked)
    if beyond is None:
        return Decision(configuration, why)
    rung, best = beyond
    return Decision(configuration, f"{why}; --allow {rung.value} would give ×{_short(best.speedup.ratio)}", rung)


def _too_little(allowed: Sequence[Standing], chosen: Standing | None) -> str:
    """What is faster and allowed, and yet not launched."""
    least = chosen.speedup.ratio if chosen else 1.0
    passed = [s for s in allowed if s is not chosen and s.speedup.sure and s.speedup.ratio > least]
    if not passed:
        return ""
    best = max(passed, key=lambda standing: standing.speedup.ratio)
    enough = f"surely {(WORTH_A_CHANGE - 1) * 100:.0f} % more than every milder rung and your settings"
    return f"; {best.rung.value} gives {best.speedup}, not {enough}: too little for a change of training"


def _beyond(ladder: Sequence[Standing], asked: StudySettings) -> tuple[Rung, Standing] | None:
    """What would be launched if the user allowed more: the rung that gives most."""
    further = [rung for rung in GRADIENT_RUNGS if not asked.allow.allows(rung)]
    found = {rung: best_allowed(ladder, rung, asked.accumulate_up_to) for rung in further}
    beyond = {rung: best for rung, best in found.items() if best and not asked.allows(best.configuration)}
    return max(beyond.items(), key=lambda one: one[1].speedup.ratio, default=None)


def _short(ratio: float) -> str:
    return f"{ratio:.{max(0, 2 - math.floor(math.log10(ratio)))}f}"
