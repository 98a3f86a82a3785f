"""The course of a diagnosis: record some steps, suspect causes, prove them by paired rounds, and draw the waterfall.

Examination(measure, surroundings, budget=30.0).run()
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from autoddp.diagnose import words
from autoddp.diagnose.cause import Surroundings, Suspicion
from autoddp.diagnose.causes import CAUSES, suspicions
from autoddp.diagnose.events import priced_by_events
from autoddp.diagnose.evidence import Evidence, joined
from autoddp.diagnose.experiments import Condition, Events
from autoddp.diagnose.findings import WORTHWHILE, Diagnosis, Finding, Level
from autoddp.diagnose.proofs import Proof, Prover, step_of
from autoddp.diagnose.rounds import MOST_RECORDED, ROUNDS_OF_SLOW, CannotRun, MeasureAnatomy, Rounds
from autoddp.timing import Difference
from autoddp.units import milliseconds

_FIRST_SHARE = 0.2
"""Share of the time for diagnosing in which steps are only recorded. Causes are suspected by these steps."""
_FEWEST_FIRST, _MOST_FIRST = 6, 150
"""Steps of the first record: enough to see what happens every tenth step, where steps are short."""
_MOST_RECORDS = 4  # as long as the first one: events that have been seen too seldom are waited for
_NOT_PROVED = "; not proved: "
_MINOR = 4.0  # a whole that costs more than so many times a special cause stands before that one
_ROUGH = 0.1  # of a price: an interval that reaches further to either side is made smaller by more rounds


class Examination:
    """Diagnoses one running job.

    `budget`: seconds of steps that it may take. `fails`: the exception of a block that cannot run.
    `ends`: the exception of a job that is over; what was found until then is told. `tell` hears of each experiment.
    `reduction`: what steps without reduction save, where that has been measured before. `precise`: whether the time
    that is left in the end makes prices more precise; else the job's steps are left for other things.
    """

    def __init__(
        self,
        measure: MeasureAnatomy,
        surroundings: Surroundings,
        budget: float,
        fails: type[Exception],
        ends: type[Exception],
        tell: Callable[[str, int, int], None] = lambda cause, number, of: None,
        reduction: Difference | None = None,
        precise: bool = True,
    ) -> None:
        self._around = surroundings
        self._tell = tell
        self._precise = precise
        self._fails, self._ends = fails, ends
        self._rounds = Rounds(measure, surroundings.job, budget)
        self._prover = Prover(self._rounds, surroundings, fails, ends, reduction)
        self._all_mended: Sequence[Evidence] = ()

    def run(self) -> Diagnosis:
        """Examine the job. Raises what `measure` raises for the script as written."""
        evidence = self._record()
        proofs: list[tuple[Suspicion, Proof]] = []
        for number, suspicion in enumerate(found := suspicions(evidence, self._around), 1):
            self._tell(suspicion.cause, number, len(found))
            # It may take twice as long as each of those after it. They share what it leaves over.
            left = self._rounds.budget - self._rounds.spent
            until = self._rounds.spent + 2 * left / (len(found) - number + 2)
            proofs.append((suspicion, self._prover.prove(suspicion, evidence, until)))
        if self._precise:
            proofs = self._measured_further(proofs)
        each = [(self._finding(suspicion, proof), proof) for suspicion, proof in proofs]
        findings = [finding for finding, _ in each if finding is not None]
        unpriced = [(one, proof) for one, proof in proofs if proof.price is None and one.guess == math.inf]
        undecided = {
            suspicion.cause: proof.price
            for (suspicion, proof), (finding, _) in zip(proofs, each, strict=True)
            if finding is None and proof.price is not None and self._prover.is_open(proof.price)
        }
        proved = {one.cause: proof for one, proof in each if one is not None and one.status == "proved"}
        findings = told_apart(findings, WORTHWHILE * self._seconds(evidence), evidence.mean(evidence.transfer))
        waterfall = self._waterfall(findings, proved, evidence)
        scaling = words.scaling(evidence, self._prover.alone)
        return Diagnosis(
            seconds=self._seconds(evidence),
            anatomy=evidence.anatomy,
            findings=findings,
            waterfall=waterfall,
            mended=joined(self._all_mended).anatomy if self._all_mended else (),
            scaling=scaling,
            not_measured=[
                *words.not_measured(evidence, self._prover.alone, self._around.job, findings),
                *map(_untold, unpriced),
                *(words.undecided(cause, price) for cause, price in undecided.items()),
            ],
            verdict=words.verdict(evidence, findings, waterfall, scaling, [*undecided]),
            spent=self._rounds.spent,
        )

    @staticmethod
    def _seconds(evidence: Evidence) -> float:
        return statistics.fmean(evidence.steps)

    def _record(self) -> Evidence:
        """Steps as written. More are recorded where something happens in a few of them only."""
        rounds = self._rounds
        rounds.step = self._seconds(rounds.block(Condition(), 2, warmup=1))
        most = min(_MOST_FIRST, MOST_RECORDED // self._around.job.world_size)
        count = max(_FEWEST_FIRST, min(most, int(_FIRST_SHARE * rounds.budget / rounds.step)))
        evidence = rounds.record_steps(count)
        for _ in range(_MOST_RECORDS - 1):
            rare = [one.proof for one in suspicions(evidence, self._around) if isinstance(one.proof, Events)]
            if not rounds.affords(2 * count) or all(priced_by_events(evidence, events) for events in rare):
                break
            evidence = rounds.record_steps()
        rounds.learn(evidence, self._seconds(evidence))
        return evidence

    def _measured_further(self, proofs: Sequence[tuple[Suspicion, Proof]]) -> list[tuple[Suspicion, Proof]]:
        """The proofs after more blocks, in the time left, for those that are undecided or whose price is rough.

        Each block is for the one that has had the least time here. What the waterfall needs is left for it.
        """
        proofs = list(proofs)
        took = [0.0] * len(proofs)
        while not self._prover.over:
            kept = self._for_waterfall([proof for _, proof in proofs])
            left = self._rounds.budget - self._rounds.spent - kept
            unsettled = [n for n, (_, proof) in enumerate(proofs) if self._is_unsettled(proof) and proof.takes < left]
            if not unsettled:
                break
            number = min(unsettled, key=took.__getitem__)
            suspicion, proof = proofs[number]
            if not took[number]:
                self._tell(f"more rounds for {suspicion.cause}", number + 1, len(proofs))
            began = self._rounds.spent
            proofs[number] = suspicion, self._prover.further(proof)
            took[number] += self._rounds.spent - began
        return proofs

    def _is_unsettled(self, proof: Proof) -> bool:
        if proof.again is None or proof.is_open:
            return proof.again is not None
        price = proof.price
        if price is None or not self._prover.is_finding(price):
            return False
        return (price.high - price.low) / 2 > _ROUGH * price.seconds

    def _for_waterfall(self, proofs: Sequence[Proof]) -> float:
        """Seconds, at least, if all of them are to be mended one after the other."""
        conditions = [Condition()]
        for proof in proofs:
            if proof.mended is not None and proof.price is not None and self._prover.is_finding(proof.price):
                conditions.append(conditions[-1].with_(proof.against).with_(proof.mended))
        if len(conditions) < 3:  # nothing to measure, or measured already
            return 0.0
        return self._rounds.cost(conditions, ROUNDS_OF_SLOW, self._rounds.steps) * self._rounds.step

    def _finding(self, suspicion: Suspicion, proof: Proof) -> Finding | None:
        """What is said of this suspicion; None where the experiment shows that it is no cause, or a small one."""
        price = proof.price
        fix = proof.advice or suspicion.advice(proof.by_fix)

        def suspected(seconds: float, text: str) -> Finding:
            return Finding(
                cause=suspicion.cause,
                ranks=suspicion.ranks,
                seconds=seconds,
                low=None,
                high=None,
                status="suspected",
                text=text,
                fix=fix,
            )

        if price is None:
            if suspicion.guess == math.inf:
                return None  # how much it costs is not even guessed
            text = f"{suspicion.seen}{_NOT_PROVED}{proof.text}"
            return suspected(suspicion.guess, text)
        if not price.sure and self._prover.is_open(price) and price.seconds >= WORTHWHILE * self._rounds.step:
            low, high = (f"{milliseconds(end)}" for end in (price.low, price.high))
            text = f"{suspicion.seen}{_NOT_PROVED}the rounds differed too much ({low} to {high} ms)"
            return suspected(price.seconds, text)
        if not self._prover.is_finding(price):
            return None
        text = suspicion.seen + (f"; {proof.text}" if proof.text else "")
        return Finding(
            cause=suspicion.cause,
            ranks=suspicion.ranks,
            seconds=price.seconds,
            low=price.low,
            high=price.high,
            status="proved",
            text=text,
            fix=fix,
        )

    # The waterfall

    def _waterfall(self, findings: Sequence[Finding], proofs: dict[str, Proof], evidence: Evidence) -> list[Level]:
        """The step with each cause mended, and all those before it. Events are left out by not counting their steps."""
        levels = [Level("as written", self._seconds(evidence))]
        conditions, causes, events = [Condition()], [""], []  # a condition without a cause: what the next one needs
        for finding in findings:
            proof = proofs.get(finding.cause)
            if proof is not None and proof.mended is not None:
                if (needed := conditions[-1].with_(proof.against)) != conditions[-1]:
                    conditions.append(needed)
                    causes.append("")
                conditions.append(conditions[-1].with_(proof.mended))
                causes.append(finding.cause)
            elif CAUSES[finding.cause].in_some_steps and finding.status == "proved":
                events.append(finding)
        named = [condition for condition, cause in zip(conditions, causes, strict=True) if cause]
        if named and all(condition == named[0] for condition in named):  # measured already
            self._all_mended = next((proof.blocks for proof in proofs.values() if proof.mended == named[0]), ())
            for finding in findings:
                if finding.cause in causes:
                    levels.append(Level(finding.cause, max(0.0, levels[-1].seconds - finding.seconds)))
        elif named and not self._prover.over:
            kept = {rank for condition in conditions for rank in condition.experiment.kept_batches}
            try:
                if kept:
                    self._rounds.keep(sorted(kept))
                blocks = self._rounds.in_turns(*conditions)
            except (self._fails, self._ends, CannotRun):
                return levels
            self._all_mended = blocks[-1]
            means = [statistics.fmean(step_of(b, c) for b in of) for of, c in zip(blocks, conditions, strict=True)]
            # What events add to a step on average stays as it is; usual steps change by the ratio to those of the same
            # rounds as written, because the machine may have changed since the record.
            added = sum(one.seconds for one in events)
            usual = levels[0].seconds - added
            left = 0.0  # of causes that are mended in part only, until another cause takes the rest away
            for number, cause in enumerate(causes[1:], 1):
                gain = means[number - 1] - means[number]
                if not cause:
                    left += gain
                    continue
                left = 0.0 if conditions[number] == conditions[number - 1] else left + gain * (1 - proofs[cause].share)
                levels.append(Level(cause, max(0.0, added + usual * (means[number] + left) / means[0])))
        for one in events:
            levels.append(Level(one.cause, max(0.0, levels[-1].seconds - one.seconds)))
        return levels


def _untold(unpriced: tuple[Suspicion, Proof]) -> str:
    """What is said of a suspicion that could not be tried, and of which no price is guessed."""
    suspicion, proof = unpriced
    return f"what {CAUSES[suspicion.cause].in_words} costs ({suspicion.cause}): {proof.text}"


def told_apart(findings: Sequence[Finding], least: float, transfer: float = 0.0) -> list[Finding]:
    """Findings in their order. `exposed_communication` keeps only the part that no more special cause explains.

    A cause that explains the whole of it takes its place, with the price of what remains. `transfer`: seconds for which
    all ranks were seen to wait for gradients; what is beside it cannot have been taken from it.
    """
    exposed = next((one for one in findings if one.cause == "exposed_communication"), None)
    parts = [one for one in findings if CAUSES[one.cause].explains == "part" and one.status == "proved"]
    beside = [one for one in findings if CAUSES[one.cause].explains == "beside" and one.status == "proved"]
    special = [one for one in findings if one in parts or one in beside]
    found = [one for one in findings if one is not exposed]
    whole = next((one for one in findings if CAUSES[one.cause].explains == "all"), None)
    general = exposed
    if exposed is not None and whole is not None:
        found.remove(whole)
        general = _priced_as(whole, exposed)
    if general is not None and exposed is not None and special:
        # Ranks that are late because of their data are so without the reduction too: then nothing is beside it.
        rest = max(exposed.seconds - sum(one.seconds for one in beside), min(exposed.seconds, transfer))
        rest -= max((one.seconds for one in parts), default=0)  # they may explain the same part
        if rest >= least:
            share = rest / exposed.seconds
            text = f"{general.text}; this is what {special[0].cause} leaves of it"
            low, high = (None if end is None else end * share for end in (exposed.low, exposed.high))
            found.append(replace(general, seconds=rest, low=low, high=high, text=text))
    elif general is not None:
        found.append(general)
    # A whole that names what to change may stand before what is beside it. What is not proved either stands before it,
    # too: it names what to change.
    kinds = ("part", "beside") if general is exposed else ("part",)
    told = next((one for one in found if general is not None and one.cause == general.cause), None)
    alike = [one for one in found if told is not None and one.status == told.status]
    named = [one.seconds for one in alike if CAUSES[one.cause].explains in kinds]
    after = min((price for price in named if told is not None and _MINOR * price >= told.seconds), default=math.inf)

    def place(one: Finding) -> tuple[bool, float, bool]:
        # What can be mended stands before what it is a part of.
        is_whole = one is told
        return one.status != "proved", -(min(one.seconds, after) if is_whole else one.seconds), is_whole

    return sorted(found, key=place)


def _priced_as(whole: Finding, exposed: Finding) -> Finding:
    """`whole` with the price of `exposed`: it cannot cost more than steps without reduction save."""
    if exposed.status != "proved":
        return replace(whole, seconds=max(whole.seconds, exposed.seconds))
    seen, _, why_not = whole.text.partition(_NOT_PROVED)
    text = f"{seen}; proved by steps without the reduction; {why_not}"
    return replace(exposed, cause=whole.cause, text=text, fix=whole.fix)
