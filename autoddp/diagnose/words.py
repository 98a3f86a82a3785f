"""What a diagnosis says in words of the whole job: what several ranks give, what is not measured, the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autoddp.diagnose.causes import CAUSES
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.findings import WORTHWHILE, Finding, Level, Scaling
from autoddp.diagnose.signs import waiting_by_turns, waits_for_a_core
from autoddp.timing import Difference
from autoddp.units import milliseconds, percent
from autoddp.wire import JobFacts

_MUCH = 0.2  # of a step, from which it is told how much of it lies in a stage that has no cause
_WHERE = {"other": "between two steps", "optimizer": "in the optimizer"}
"""Stages for which no cause is known where all ranks spend the same in them: the script's own code, mostly."""
_OFTEN = {"optimizer": "; fused=True, unless it is set already or the optimizer takes none, often makes it shorter"}
"""What often helps in such a stage. It is not tried: the script has made its optimizer before autoddp sees it."""
_AS_WELL = 1.1  # times what one rank gives: no more than that is not worth several


def scaling(evidence: Evidence, alone: Sequence[Evidence]) -> Scaling:
    """What several ranks give against one, from steps in which each rank has computed for itself."""
    ranks = len(evidence.ranks)
    blocks = alone or [evidence]
    whole = statistics.fmean(evidence.steps)
    # What some steps have beside the usual, such as an evaluation, one rank would have as well.
    events = whole - evidence.seconds
    one = statistics.fmean(statistics.fmean(block.means(block.own)) for block in blocks) + events
    efficiency = min(1.0, one / whole)
    gain = ranks * efficiency
    samples = evidence.samples
    per_second = None if samples is None else samples / whole
    of_one = None if samples is None else samples / ranks / one
    if ranks == 1:
        text = "One rank: there is nothing to scale"
    elif gain < 1 / _AS_WELL:
        text = f"{ranks} ranks give {gain:.2f} times what one gives: one alone would be faster"
    elif gain <= _AS_WELL:
        text = f"{ranks} ranks give {gain:.2f} times what one gives: one would do as well"
    else:
        text = f"{ranks} ranks give {gain:.2f} times what one gives ({percent(efficiency)} of perfect scaling)"
    return Scaling(ranks, per_second, of_one, efficiency, text)


def not_measured(
    evidence: Evidence, alone: Sequence[Evidence], job: JobFacts, findings: Sequence[Finding]
) -> list[str]:
    """What the diagnosis cannot say, as sentences. `alone`: see `scaling`."""
    found = []
    if not evidence.readers:
        found.append(
            "the data loader: the script reads no torch DataLoader in its training loop, so waiting for data is part "
            "of `other`"
        )
    if evidence.taken_over >= WORTHWHILE * evidence.seconds:
        found.append(
            f"what taking batches over costs that worker processes have ready ({milliseconds(evidence.taken_over)} ms "
            "of `data`): fewer tensors in a batch make it less, and so does num_workers=0 where loading is quicker"
        )
    found += [
        f"what takes the script {milliseconds(own)} of {milliseconds(evidence.seconds)} ms {where} on every rank "
        f"(`{stage}`): it is not divided further{_OFTEN.get(stage, '')}"
        for own, where, stage in undivided(evidence)
    ]
    if beside := threads_beside(alone):
        found.append(
            f"what threads beside the one that trains cost: they compute for {milliseconds(beside)} ms of each step on "
            "every rank, also without the reduction, and take cores, or Python's lock, from it (loading, tokenizing, "
            "watching); a process of its own takes no lock"
        )
    if all(device == "cpu" for device in job.devices):
        found.append("what only a GPU has: launches of kernels, copies to the device, waiting for it")
    found += dict.fromkeys(filter(None, (CAUSES[one.cause].not_measured(one) for one in findings)))
    if len(evidence.ranks) == 1:
        found.append("everything between ranks: there is one")
    return found


def undivided(evidence: Evidence) -> list[tuple[float, str, str]]:
    """Seconds that every rank spends in a stage of `_WHERE`, where that is, and the stage: those that take much."""
    least = [(min(evidence.means(evidence.stage(stage))), where, stage) for stage, where in _WHERE.items()]
    return sorted((one for one in least if one[0] >= _MUCH * evidence.seconds), reverse=True)


def lacks_cores(evidence: Evidence, findings: Sequence[Finding]) -> float:
    """Seconds of a step for which every rank's training waits for a core, where that is much, and no finding; else 0.

    No experiment can take away what other programs do, so it has no price.
    """
    waits = waits_for_a_core(evidence)
    told = any(CAUSES[one.cause].tells_of_cores for one in findings)
    return waits if waits >= _MUCH * evidence.seconds and not told else 0.0


def threads_beside(alone: Sequence[Evidence]) -> float:
    """Seconds of a step that threads beside the one that trains compute on every rank, where that is much; else 0.

    In steps without reduction no thread moves gradients. Where operators have threads of their own, a GPU's gradients
    are computed in one, or the script calls collectives of its own, nobody can tell which ones have computed.
    """
    each_rank = [one for block in alone for one in block.ranks]
    if not alone or any(one.threads != 1 or one.queued or any(one.meeting) for one in each_rank):
        return 0.0
    each = zip(*([one.helpers_ran / block.count for one in block.ranks] for block in alone), strict=True)
    least = min(map(statistics.fmean, each))
    return least if least >= _MUCH * statistics.fmean(block.seconds for block in alone) else 0.0


def undecided(cause: str, price: Difference) -> str:
    """What is said of a cause that rounds have neither proved nor refuted, and that may well cost nothing."""
    low, high = milliseconds(price.low), milliseconds(price.high)
    return f"whether {cause} costs anything: {low} to {high} ms per step, because the rounds differed too much"


def verdict(
    evidence: Evidence,
    findings: Sequence[Finding],
    waterfall: Sequence[Level],
    scaled: Scaling,
    unsure: Sequence[str] = (),
) -> list[str]:
    """At most three lines, the most important one first. `unsure`: causes that are no findings, and not refuted."""
    seconds = statistics.fmean(evidence.steps)
    proved = [one for one in findings if one.status == "proved"]
    own, where, stage = next(iter(undivided(evidence)), (0.0, "", ""))
    no_core = lacks_cores(evidence, findings)
    lines = []
    if findings and findings[0].status == "suspected":
        first = findings[0]
        lines.append(
            f"Suspected: {first.cause}, up to {milliseconds(first.seconds)} of {milliseconds(seconds)} ms per step"
        )
    if proved:
        first = proved[0]
        saved, whole = milliseconds(first.seconds), milliseconds(seconds)
        share, travel = percent(first.seconds / seconds), evidence.mean(evidence.transfer)
        beyond = first.seconds > travel + WORTHWHILE * seconds and waiting_by_turns(evidence)
        if first.cause == "exposed_communication" and beyond:
            lines.append(
                f"Without the reduction a step of {whole} ms is {saved} ms shorter ({share}; {first.cause}), but ranks "
                f"wait only {milliseconds(travel)} ms for their gradients; the rest is waiting for each other by "
                f"turns: {first.fix}"
            )
        else:
            # With a larger batch a step is no shorter: what there is to save is shared by more samples.
            says = f"{first.cause} costs" if CAUSES[first.cause].explains == "all" else f"Mending {first.cause} saves"
            lines.append(f"{says} {saved} of {whole} ms per step ({share}): {first.fix}")
        others = [f"{one.cause} ({milliseconds(one.seconds)} ms)" for one in proved[1:]]
        if others and len(lines) < 2:
            end = f"; all mended: {milliseconds(waterfall[-1].seconds)} ms per step" if len(waterfall) > 2 else ""
            lines.append(f"Also proved: {', '.join(others)}{end}")
    elif not findings:
        rest = f", of which the script spends {milliseconds(own)} ms {where}" if own else ""
        costs = f"that costs 3 % of a step of {milliseconds(seconds)} ms{rest}"
        if unsure:
            tell = f"the rounds differed too much to tell what {' and '.join(unsure)} cost{'s' * (len(unsure) == 1)}"
            lines.append(f"Nothing found for sure {costs}; {tell}")
        else:
            lines.append(f"Nothing found {costs}")
    elif own <= findings[0].seconds:  # else the next line says more
        lines.append("Nothing proved that costs 3 % of a step")
    if no_core > max((one.seconds for one in findings), default=0.0):
        # Instead of the stages, which it makes longer, and of what else was proved: the table has both.
        lines[1:] = [
            f"Every rank waits {milliseconds(no_core)} of {milliseconds(seconds)} ms for a core, which other ranks, "
            "threads or programs use (top shows them)"
        ]
    elif findings and own > findings[0].seconds and len(lines) < 2:
        lines.append(
            f"Every rank spends {milliseconds(own)} of {milliseconds(seconds)} ms {where} (`{stage}`), which is not "
            "divided further"
        )
    lines.append(scaled.text)
    return lines
