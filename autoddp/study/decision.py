"""The decision of a study in words. What is launched of a ladder is decided in `recipe.decision`."""

from __future__ import annotations

from collections.abc import Sequence

from autoddp.knobs import AS_WRITTEN, GRADIENT_RUNGS, Rung
from autoddp.knobs.micro_batches import larger_batch
from autoddp.recipe import best_allowed
from autoddp.recipe.decision import WORTH_A_CHANGE
from autoddp.settings import StudySettings
from autoddp.study.outcome import Decision, Standing
from autoddp.timing import Headroom
from autoddp.units import ratio


def decide(ladder: Sequence[Standing], asked: StudySettings, headroom: Headroom | None) -> Decision:
    """The decision on a ladder from `ladder_of`: what is launched, and why.

    `headroom`: what a DDP job could win at most; None where that is not known.
    """
    chosen = best_allowed(ladder, asked.allow, asked.accumulate_up_to)
    allowed = [standing for standing in ladder if asked.allows(standing.configuration)]
    if chosen is None:
        configuration = AS_WRITTEN
        why = f"no significant gain within what you allow ({asked.allowed}): your settings stay"
        why += f"; headroom {headroom}" if headroom is not None else ""
    else:
        configuration = chosen.configuration
        why = f"the best of what you allow ({asked.allowed}): {chosen.speedup} against your settings"
        why += larger_batch(configuration.steps_per_update)
    why += _too_little(allowed, chosen)
    beyond = _beyond(ladder, asked, chosen.speedup.ratio if chosen else 1.0)
    if beyond is not None:
        rung, best = beyond
        return Decision(configuration, f"{why}; --allow {rung.value} would give ×{ratio(best.speedup.ratio)}", rung)
    maybe = _likely_beyond(ladder, asked, chosen.speedup.ratio if chosen else 1.0)
    if maybe is not None:
        why += f"; --allow {maybe.rung.value} may give ×{ratio(maybe.speedup.ratio)}"
    return Decision(configuration, why)


def _too_little(allowed: Sequence[Standing], chosen: Standing | None) -> str:
    """A clause that explains why an allowed and faster configuration is not launched; "" if there is none."""
    least = chosen.speedup.ratio if chosen else 1.0
    passed = [s for s in allowed if s is not chosen and s.speedup.sure and s.speedup.ratio > least]
    if not passed:
        return ""
    best = max(passed, key=lambda standing: standing.speedup.ratio)
    enough = f"surely {(WORTH_A_CHANGE - 1) * 100:.0f} % more than your settings and each milder rung that gains"
    return f"; {best.rung.value} gives {best.speedup}, not {enough}: too little for a change of training"


def _beyond(ladder: Sequence[Standing], asked: StudySettings, launched: float) -> tuple[Rung, Standing] | None:
    """The rung, and its best, that would be launched if the user allowed more: of several, the one with most gain.

    It had fewer rounds. Where its gain over the script as written is less in them than that of what is `launched` in
    all of its rounds, a reader would take it for slower.
    """
    further = [rung for rung in GRADIENT_RUNGS if not asked.allow.allows(rung)]
    found = {rung: best_allowed(ladder, rung, asked.accumulate_up_to) for rung in further}
    beyond = {rung: best for rung, best in found.items() if best and not asked.allows(best.configuration)}
    beyond = {rung: best for rung, best in beyond.items() if best.speedup.ratio > launched}
    return max(beyond.items(), key=lambda one: one[1].speedup.ratio, default=None)


def _likely_beyond(ladder: Sequence[Standing], asked: StudySettings, launched: float) -> Standing | None:
    """The best of what is not allowed and likely gains more than what is launched; it had a few rounds only."""
    found = [one for one in ladder if one.rung in GRADIENT_RUNGS and not asked.allow.allows(one.rung)]
    found = [one for one in found if one.likely_low > WORTH_A_CHANGE * launched]
    return max(found, key=lambda one: one.speedup.ratio, default=None)
