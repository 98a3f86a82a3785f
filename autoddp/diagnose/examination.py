"""The course of a diagnosis: record some steps, suspect causes, prove them by paired rounds, and draw the waterfall.

    Examination(measure, surroundings, budget=30.0).run()

What is asked of the job depends only on what was measured, so every host of a job asks the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from autoddp import codec
from autoddp.diagnose import words
from autoddp.diagnose.evidence import Evidence, joined
from autoddp.diagnose.findings import WORTHWHILE, Diagnosis, Finding, Level
from autoddp.diagnose.suspicions import (
    STARVED,
    Condition,
    Dose,
    Events,
    Mend,
    Probe,
    Surroundings,
    Suspicion,
    gain_of_slow_rank,
    priced_by_events,
    suspicions,
)
from autoddp.knobs import Configuration
from autoddp.timing import Difference, difference
from autoddp.units import data_size, milliseconds
from autoddp.wire import PREFETCHED, BlockDone, Experiment

_FIRST_SHARE = 0.2
"""Of the time for diagnosing, in which steps are only recorded. Causes are suspected by these steps."""
_FEWEST_FIRST, _MOST_FIRST = 6, 150
"""Steps of the first record: enough to see what happens every tenth step, where steps are short."""
_MOST_RECORDED = 20_000  # steps of all ranks together in one block: they travel in one message
_MOST_RECORDS = 4  # as long as the first one: events that have been seen too seldom are waited for
_ROUNDS = 6  # pairs of blocks: Student's t for 99 % reaches 1.6 times their spread to either side
_ROUNDS_OF_SLOW = 4  # 2.9 times, where steps are so long that the link decides their time
_MOST_ROUNDS = 24  # where fewer neither prove nor refute anything
_ROUGH = 0.1  # of a price: an interval that reaches further to either side is made smaller by more rounds
_SLOW = 0.3  # seconds
_BLOCK = 0.25  # seconds of a block, at least
_FEWEST, _MOST = 3, 40  # steps of a block
_WARMUP = 2  # steps after a change; DDP sorts its buckets anew in the first one after a rebuild
_LEAST_BEHIND = 0.25  # of a step, for which a loader is waited for: if it is less, its queue lasts too long to wait for
_KEPT = 40  # batches that are kept for experiments, if there is time to see so many
_FEWEST_KEPT = 6
_CRITICAL = 0.5  # seconds that a step grows by for each second of delay, from which all ranks wait for the delayed one


class MeasureAnatomy(Protocol):
    """Times steps of the running model and records their stages. TrialFailed and TuningOver as for `study.Measure`."""

    def __call__(
        self,
        configuration: Configuration,
        warmup: int,
        steps: int,
        *,
        reduce: bool,
        apply: bool,
        experiment: Experiment,
    ) -> BlockDone:
        """As `study.Measure`, with `anatomy`."""


@dataclass(frozen=True)
class _Proof:
    """What an experiment has given for a suspicion; `price` is None where there was none."""

    price: Difference | None
    text: str
    mended: Condition | None = None
    """How the job ran without the cause, as far as its fix can take it away."""
    against: Condition = field(default_factory=Condition)
    """How it ran with the cause."""
    by_fix: bool | None = None
    """Whether `Suspicion.fixed` is the fix; None where there are others too: it was not tried, or gives little."""
    share: float = 1.0
    """The part of what `mended` gives that mending this cause would give."""
    blocks: Sequence[Evidence] = ()
    """Those of `mended`."""
    is_open: bool = False
    """Whether the blocks so far neither prove nor refute the suspicion."""
    again: Callable[[], _Proof] | None = None
    """Measures some more blocks, and gives what they and those before them say; None where more would say the same."""
    takes: float = 0.0
    """Seconds that `again` takes."""


_Judge = Callable[[Sequence[Evidence], Sequence[Evidence]], _Proof]
"""What blocks under two conditions say."""


class CannotRun(Exception):
    """An experiment is not possible in this job; the text says why."""


class Examination:
    """Of one running job.

    `budget`: seconds of steps that it may take. `fails`: the exception of a block that cannot run.
    `ends`: that of a job that is over; what was found until then is told. `tell` hears of each experiment.
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
        self._measure = measure
        self._around = surroundings
        self._budget = budget
        self._fails = fails
        self._ends = ends
        self._over = ""
        self._tell = tell
        self._reduction = reduction
        self._precise = precise
        self._present: Condition | None = None
        self._spent = 0.0
        self._share_ends = budget
        self._step = math.nan
        self._queued = 0
        self._late = self._alone_takes = 1.0
        self._stored: list[tuple[int, ...]] = []
        self._kept = self._count = 0
        self._recorded: list[Evidence] = []
        self._off: _Proof | None = None
        self._alone: Sequence[Evidence] = ()
        self._all_mended: Sequence[Evidence] = ()

    def run(self) -> Diagnosis:
        """Examine the job. Raises what `measure` raises for the script as written."""
        self._step = statistics.fmean(self._block(Condition(), 2, warmup=1).steps)
        evidence = self._record()
        self._step = self._seconds(evidence)
        self._late = max(evidence.means(evidence.stage("data"))) / evidence.seconds
        self._alone_takes = 1.0 - evidence.mean(evidence.transfer) / evidence.seconds
        proofs: list[tuple[Suspicion, _Proof]] = []
        for number, suspicion in enumerate(found := suspicions(evidence, self._around), 1):
            self._tell(suspicion.cause, number, len(found))
            # It may take twice as long as each of those after it. They share what it leaves over.
            self._share_ends = self._spent + 2 * (self._budget - self._spent) / (len(found) - number + 2)
            proof = self._prove(suspicion, evidence) if not self._over else _Proof(None, self._over)
            proofs.append((suspicion, proof))
        if self._precise:
            proofs = self._measured_further(proofs)
        each = [(self._finding(suspicion, proof), proof) for suspicion, proof in proofs]
        findings = [finding for finding, _ in each if finding is not None]
        proved = {one.cause: proof for one, proof in each if one is not None and one.status == "proved"}
        findings = _told_apart(findings, WORTHWHILE * self._seconds(evidence))
        waterfall = self._waterfall(findings, proved, evidence)
        scaling = words.scaling(evidence, self._alone)
        return Diagnosis(
            seconds=self._seconds(evidence),
            anatomy=evidence.anatomy,
            findings=findings,
            waterfall=waterfall,
            mended=joined(self._all_mended).anatomy if self._all_mended else (),
            scaling=scaling,
            not_measured=words.not_measured(evidence, self._around.job, findings),
            verdict=words.verdict(evidence, findings, waterfall, scaling),
            spent=self._spent,
        )

    @staticmethod
    def _seconds(evidence: Evidence) -> float:
        return statistics.fmean(evidence.steps)

    # Blocks

    def _block(self, condition: Condition, steps: int, warmup: int | None = None) -> Evidence:
        """Measure under `condition`. Steps after a change of it are not counted."""
        changes = condition != self._present
        if warmup is None:
            warmup = self._settling(self._present, condition) if changes else 0
        before, self._present = self._present, None  # not known, if it fails
        same = before is not None and before.configuration == condition.configuration
        done = self._measure(
            condition.configuration,
            warmup,
            steps,
            reduce=condition.reduce,
            apply=not same,
            experiment=condition.experiment,
        )
        self._present = condition
        self._spent += sum(done.seconds) + done.warmup_seconds + done.apply_seconds
        evidence = Evidence(done.ranks)
        self._queued = max(self._queued, *(one.prefetched for one in done.ranks))
        self._stored = [one.stored for one in done.ranks]  # none, if the script was started again
        kept = [done.ranks[rank].kept for rank in condition.experiment.kept_batches]
        if kept and not any(self._stored):
            raise CannotRun("the script ended while batches were kept")
        if not all(kept):
            raise CannotRun(_why_none_kept(condition.experiment))
        return evidence

    def _settling(self, before: Condition | None, after: Condition) -> int:
        """Steps after a change that are not counted.

        Batches that have waited in a loader's queues, while another one was read, must be used up. Meanwhile the
        loader's workers go on, so a queue lasts the longer, the less they are behind.
        """
        if before is not None and before.without_additions == after.without_additions:
            return 1
        used_kept = before is not None and before.experiment.kept_batches and not after.experiment.kept_batches
        workers = after.experiment.loader_workers
        had_them = before is not None and before.experiment.loader_workers == workers
        queued = (self._queued if used_kept else 0) + (0 if had_them else PREFETCHED * workers)
        return _WARMUP + math.ceil(queued / max(_LEAST_BEHIND, self._late))

    @property
    def _steps(self) -> int:
        """Of a block."""
        if self._step >= _SLOW:
            return 3
        most = min(_MOST, _MOST_RECORDED // self._around.job.world_size)
        return max(_FEWEST, min(most, math.ceil(_BLOCK / self._step)))

    @property
    def _rounds(self) -> int:
        return _ROUNDS_OF_SLOW if self._step >= _SLOW else _ROUNDS

    def _affords(self, steps: float) -> bool:
        return self._spent + steps * self._step <= self._budget

    def _record(self) -> Evidence:
        """Steps as written. More are recorded where something happens in a few of them only."""
        count = int(_FIRST_SHARE * self._budget / self._step)
        most = min(_MOST_FIRST, _MOST_RECORDED // self._around.job.world_size)
        count = max(_FEWEST_FIRST, min(most, count))
        self._count = count
        self._recorded = [self._block(Condition(), count)]
        while len(self._recorded) < _MOST_RECORDS and self._affords(2 * count):
            evidence = joined(self._recorded)
            rare = [s for s in suspicions(evidence, self._around) if isinstance(s.proof, Events)]
            if all(priced_by_events(evidence, s.proof) for s in rare if isinstance(s.proof, Events)):
                break
            self._recorded.append(self._block(Condition(), count))
        return joined(self._recorded)

    # Proofs

    def _prove(self, suspicion: Suspicion, evidence: Evidence) -> _Proof:
        try:
            match suspicion.proof:
                case Events() as events:
                    return self._by_events(events, evidence)
                case Mend() as mend:
                    return self._as_fixed(suspicion, mend)
                case Probe() as probe:
                    return self._probed(probe, suspicion)
                case Dose() as dose:
                    return self._dosed(dose)
        except self._fails as failed:
            return _Proof(None, f"the script fails in that experiment: {failed}")
        except CannotRun as impossible:
            return _Proof(None, str(impossible))
        except self._ends as over:
            self._over = f"the script ended before: {over}"
            return _Proof(None, self._over)
        return _Proof(None, suspicion.why_not or "no experiment is known for it")

    def _measured_further(self, proofs: Sequence[tuple[Suspicion, _Proof]]) -> list[tuple[Suspicion, _Proof]]:
        """The same, with more blocks for what is undecided and for prices that are not known well, in the time left.

        Always for the one that has had the least time here. What the waterfall needs is left for it.
        """
        proofs = list(proofs)
        took = [0.0] * len(proofs)
        while not self._over:
            left = self._budget - self._for_waterfall([proof for _, proof in proofs]) - self._spent
            unsettled = [n for n, (_, proof) in enumerate(proofs) if self._is_unsettled(proof) and proof.takes < left]
            if not unsettled:
                break
            number = min(unsettled, key=took.__getitem__)
            suspicion, proof = proofs[number]
            assert proof.again is not None
            if not took[number]:
                self._tell(f"more rounds for {suspicion.cause}", number + 1, len(proofs))
            began = self._spent
            try:
                proof = proof.again()
            except (self._fails, CannotRun):
                proof = replace(proof, again=None)
            except self._ends as over:
                self._over = f"the script ended before: {over}"
            proofs[number] = suspicion, proof
            took[number] += self._spent - began
        return proofs

    def _is_unsettled(self, proof: _Proof) -> bool:
        if proof.again is None or proof.is_open:
            return proof.again is not None
        price = proof.price
        return price is not None and self._is_finding(price) and (price.high - price.low) / 2 > _ROUGH * price.seconds

    def _for_waterfall(self, proofs: Sequence[_Proof]) -> float:
        """Seconds, at least, if all of them are to be mended one after the other."""
        conditions = [Condition()]
        for proof in proofs:
            if proof.mended is not None and proof.price is not None and self._is_finding(proof.price):
                conditions.append(conditions[-1].with_(proof.against).with_(proof.mended))
        if len(conditions) < 3:  # nothing to measure, or measured already
            return 0.0
        return self._cost(conditions, _ROUNDS_OF_SLOW, self._steps) * self._step

    def _by_events(self, events: Events, evidence: Evidence) -> _Proof:
        price = priced_by_events(evidence, events)

        def again() -> _Proof:
            self._recorded.append(self._block(Condition(), self._count))
            return self._by_events(events, joined(self._recorded))

        few = "" if price else "too few of these steps were seen to give an interval"
        takes = self._count * self._step
        return _Proof(price, few, is_open=price is None or self._is_open(price), again=again, takes=takes)

    def _as_fixed(self, suspicion: Suspicion, mend: Mend) -> _Proof:
        """Measure the mended script, and the fix itself, where that is known to give less."""
        fixed = suspicion.fixed
        try:
            proof = self._mended(mend)
        except (self._fails, CannotRun):
            if fixed is None or fixed.mended.experiment.memory == mend.mended.experiment.memory:
                raise
            return _with_words(self._mended(fixed), f"proved with {suspicion.fix}", by_fix=True)
        price = proof.price
        if fixed is None or price is None or not self._is_finding(price):
            return proof
        what = f"{suspicion.most} a step would be {milliseconds(price.seconds)} ms shorter"
        try:
            by_fix = self._mended(fixed)
        except CannotRun as impossible:
            return _with_words(proof, f"{what}; {suspicion.fix} were not tried: {impossible}")
        except self._fails as failed:
            return _with_words(proof, f"{what}; the script fails with {suspicion.fix}: {failed}")
        except self._ends as over:
            self._over = f"the script ended before: {over}"
            return _with_words(proof, f"{what}; {suspicion.fix} were not tried: {self._over}")
        assert by_fix.price is not None
        if self._is_finding(by_fix.price):
            most_of_it = by_fix.price.seconds > price.seconds / 2
            return _with_words(by_fix, f"proved with {suspicion.fix}; {what}", most_of_it or None, price)
        if self._is_open(by_fix.price):
            return _with_words(proof, f"{what}; {suspicion.fix} were tried, but the rounds differed too much")
        return _with_words(proof, f"{what}; {suspicion.fix} were tried and save next to nothing", by_fix=False)

    def _is_finding(self, price: Difference) -> bool:
        """Whether it is surely more than nothing, and worth while."""
        return price.sure and price.seconds >= WORTHWHILE * self._step

    def _mended(self, mend: Mend) -> _Proof:
        """The script as written, or as `against`, in turns with the script mended: A B B A A B …"""
        mended, against = mend.mended, mend.against
        is_off = mended == Condition(reduce=False)
        if is_off and self._off is None and self._reduction is not None:
            self._off = _Proof(self._reduction, "", mended, is_open=self._is_open(self._reduction))
        if is_off and self._off is not None and not self._off.is_open:
            return self._off
        if mended.experiment.kept_batches:
            self._keep(mended.experiment.kept_batches)
        if mend.even:
            mended = replace(mended, experiment=codec.replace(mended.experiment, sizes=self._sizes))

        def judge(before: Sequence[Evidence], after: Sequence[Evidence]) -> _Proof:
            price = difference([_step_of(b, against) for b in before], [_step_of(b, mended) for b in after])
            if is_off:
                self._alone = after
            return _Proof(price, "", mended, against, blocks=after, is_open=self._is_open(price))

        proof = self._in_turns_until_sure((against, mended), judge)
        if is_off:
            self._off = proof
        return proof

    def _in_turns_until_sure(self, conditions: tuple[Condition, Condition], judge: _Judge) -> _Proof:
        """Rounds of two conditions until `judge` finds them sufficient, or the time for this suspicion is over."""
        first: list[Evidence] = []
        second: list[Evidence] = []

        def again() -> _Proof:
            began = self._spent
            more = self._in_turns(*conditions)
            first.extend(more[0])
            second.extend(more[1])
            return replace(judge(first, second), again=again, takes=self._spent - began)

        proof = again()
        while proof.is_open and len(first) < _MOST_ROUNDS and self._can_turn(*conditions):
            proof = again()
        return proof

    def _is_open(self, price: Difference) -> bool:
        """Whether nothing is proved, and nothing refuted."""
        return price.low <= 0 < WORTHWHILE * self._step < price.high

    def _can_turn(self, *conditions: Condition) -> bool:
        """Whether some more rounds fit into the time of this suspicion and into the budget."""
        return self._spent < self._share_ends and bool(self._plans(*conditions))

    def _plans(self, *conditions: Condition) -> list[tuple[int, int]]:
        """Rounds and steps of their blocks for which there is time, the most first."""
        plans = [(self._rounds, self._steps), (_ROUNDS_OF_SLOW, self._steps), (_ROUNDS_OF_SLOW, _FEWEST)]
        if any(condition.experiment.sizes for condition in conditions):
            # Blocks of the same batches: all of them, once or several times.
            whole = self._kept * max(1, round(self._steps / self._kept))
            plans = [(self._rounds, whole), (_ROUNDS_OF_SLOW, whole), (_ROUNDS_OF_SLOW, self._kept)]
        return [plan for plan in plans if self._affords(self._cost(conditions, *plan))]

    def _cost(self, conditions: Sequence[Condition], rounds: int, steps: int) -> float:
        """Steps as written that take as long as so many rounds of blocks."""
        # Blocks of one condition that follow each other need no steps to settle.
        settling = sum(max(self._settling(a, b), self._settling(b, a)) for a, b in pairwise(conditions))
        each = sum(1.0 if condition.reduce else self._alone_takes for condition in conditions)
        return rounds * (each * steps + settling)

    def _in_turns(self, *conditions: Condition) -> list[list[Evidence]]:
        """The same number of blocks of each. Every second round goes backwards, so that a drift hits all alike."""
        plans = self._plans(*conditions)
        if not plans:
            raise CannotRun("the time for diagnosing was over (--diagnose-budget)")
        rounds, steps = plans[0]
        found: list[list[Evidence]] = [[] for _ in conditions]
        for number in range(rounds):
            order = list(enumerate(conditions))
            for place, condition in order if number % 2 == 0 else reversed(order):
                found[place].append(self._block(condition, steps))
        return found

    def _keep(self, ranks: Sequence[int]) -> None:
        """Let all ranks keep batches, of which these will be asked for."""
        if not any(self._stored):
            self._let_keep()
        self._kept = min(len(self._stored[rank]) for rank in ranks)
        if self._kept < 2:
            raise CannotRun("the loader's batches could not be kept")

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Of the batches that all ranks keep, as many as one rank keeps, from the smallest to the largest."""
        pooled = sorted(size for of_rank in self._stored for size in of_rank)
        return tuple(pooled[(2 * place + 1) * len(pooled) // (2 * self._kept)] for place in range(self._kept))

    def _let_keep(self) -> None:
        count = max(_FEWEST_KEPT, min(_KEPT, int(0.2 * self._budget / self._step)))
        if not self._affords(count):
            raise CannotRun("the time for diagnosing was over (--diagnose-budget)")
        # None of these steps is a warm-up: a script that ends among them must not count as one that is too short.
        self._block(Condition(experiment=Experiment(keep=True)), count, warmup=0)

    def _probed(self, probe: Probe, suspicion: Suspicion) -> _Proof:
        """A delay on the rank that all are said to wait for: if they do, each step grows by as much."""
        delay = probe.delay

        def judge(as_written: Sequence[Evidence], delayed: Sequence[Evidence]) -> _Proof:
            grows = difference([block.seconds for block in delayed], [block.seconds for block in as_written])
            slope = grows.times(1 / delay.seconds)
            grown = (
                f"a delay of {milliseconds(delay.seconds)} ms there made a step {milliseconds(grows.seconds)} ms longer"
            )
            if slope.high < _CRITICAL:
                # The rank's own time grows by the delay, unless it waited there itself, as for a thread of its own.
                longer = _own(delayed, delay.rank) - _own(as_written, delay.rank)
                if longer >= _CRITICAL * delay.seconds:
                    return _Proof(Difference(0.0, 0.0, 0.0), f"{grown}: the other ranks do not wait for it")
                waits = (
                    "the rank itself waits for something that goes on meanwhile, such as a thread that loads batches"
                )
                return _Proof(None, f"{grown}, because {waits}")
            if slope.low < _CRITICAL:
                return _Proof(None, f"{grown}, but the rounds differed too much to be sure", is_open=True)
            prices = [gain_of_slow_rank(block, suspicion) for block in as_written]
            text = (
                f"proved by a delay of {milliseconds(delay.seconds)} ms there, which made each step of all ranks "
                f"{milliseconds(grows.seconds)} ms longer"
            )
            return _Proof(difference(prices, [0.0] * len(prices)), text)

        return self._in_turns_until_sure((Condition(), Condition(experiment=Experiment(delay=delay))), judge)

    def _dosed(self, dose: Dose) -> _Proof:
        """The link's rate by what added bytes cost, and what its due rate would leave of the ranks' waiting."""
        around = self._around
        due, _ = around.due
        slow = around.travels(dose.bytes) / (STARVED * due)  # seconds: what takes longer is a slow link
        added = Condition(experiment=Experiment(added_bytes=dose.bytes))

        def judge(as_written: Sequence[Evidence], more: Sequence[Evidence]) -> _Proof:
            cost = difference([block.seconds for block in more], [block.seconds for block in as_written])
            measured = f"{data_size(dose.bytes)} more made a step {milliseconds(cost.seconds)} ms longer"
            if cost.high < slow:
                return _Proof(Difference(0.0, 0.0, 0.0), measured)
            if cost.low < slow:
                unsure = f"{measured}, but the rounds differed too much to be sure of the link's rate"
                return _Proof(None, unsure, is_open=True)
            return _Proof(cost, measured)

        def settled(of_bytes: _Proof) -> _Proof:
            again = of_bytes.again
            if of_bytes.is_open and again is not None:
                return replace(of_bytes, again=lambda: settled(again()))
            if of_bytes.price is None or not of_bytes.price.sure:
                return replace(of_bytes, again=None)
            rate = around.travels(dose.bytes) / of_bytes.price.seconds
            text = f"proved: {of_bytes.text}, which is {data_size(int(rate))}/s"
            return self._of_faster_link(rate, text, self._mended(Mend(Condition(reduce=False))))

        return settled(self._in_turns_until_sure((Condition(), added), judge))

    def _of_faster_link(self, rate: float, text: str, off: _Proof) -> _Proof:
        """What the due rate would leave of the ranks' waiting. `off`: the steps without reduction."""
        around = self._around
        due, _ = around.due
        assert off.price is not None
        # What is latency stays. If a part is hidden now, a faster link hides more, and gives a little more than this.
        bytes_take = around.travels(around.job.gradient_bytes) / rate
        share = (1 - rate / due) * min(1.0, bytes_take / off.price.seconds if off.price.sure else 1.0)
        again = off.again
        further = None if again is None else lambda: self._of_faster_link(rate, text, again())
        return replace(off, price=off.price.times(share), text=text, share=share, again=further)

    def _finding(self, suspicion: Suspicion, proof: _Proof) -> Finding | None:
        """None where the experiment says that it is no cause, or a small one."""
        price = proof.price
        fix = words.fix(suspicion, self._around, proof.by_fix)
        if price is None:
            if suspicion.guess >= self._step and suspicion.cause == "find_unused_parameters":
                return None  # how much is not even known
            text = f"{suspicion.seen}; not proved: {proof.text}"
            return Finding(suspicion.cause, suspicion.ranks, suspicion.guess, None, None, "suspected", text, fix)
        if not price.sure and self._is_open(price) and price.seconds >= WORTHWHILE * self._step:
            low, high = (f"{milliseconds(end)}" for end in (price.low, price.high))
            text = f"{suspicion.seen}; not proved: the rounds differed too much ({low} to {high} ms)"
            return Finding(suspicion.cause, suspicion.ranks, price.seconds, None, None, "suspected", text, fix)
        if not self._is_finding(price):
            return None
        text = suspicion.seen + (f"; {proof.text}" if proof.text else "")
        return Finding(suspicion.cause, suspicion.ranks, price.seconds, price.low, price.high, "proved", text, fix)

    # The waterfall

    def _waterfall(self, findings: Sequence[Finding], proofs: dict[str, _Proof], evidence: Evidence) -> list[Level]:
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
            elif finding.cause in words.IN_SOME_STEPS and finding.status == "proved":
                events.append(finding)
        named = [condition for condition, cause in zip(conditions, causes, strict=True) if cause]
        if named and all(condition == named[0] for condition in named):  # measured already
            self._all_mended = next((proof.blocks for proof in proofs.values() if proof.mended == named[0]), ())
            for finding in findings:
                if finding.cause in causes:
                    levels.append(Level(finding.cause, max(0.0, levels[-1].seconds - finding.seconds)))
        elif named and not self._over:
            kept = {rank for condition in conditions for rank in condition.experiment.kept_batches}
            try:
                if kept:
                    self._keep(sorted(kept))
                blocks = self._in_turns(*conditions)
            except (self._fails, self._ends, CannotRun):
                return levels
            self._all_mended = blocks[-1]
            means = [statistics.fmean(_step_of(b, c) for b in of) for of, c in zip(blocks, conditions, strict=True)]
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


def _with_words(proof: _Proof, text: str, by_fix: bool | None = None, most: Difference | None = None) -> _Proof:
    """The same proof told in other words, also after more blocks.

    `most`: what no fix can give more than. Rounds on a busy machine may say that one does.
    """
    again = proof.again
    further = None if again is None else lambda: _with_words(again(), text, by_fix, most)
    beyond = most is not None and proof.price is not None and proof.price.seconds > most.high
    return replace(proof, price=most if beyond else proof.price, text=text, by_fix=by_fix, again=further)


def _own(blocks: Sequence[Evidence], rank: int) -> float:
    """Seconds of a step that this rank needs by itself."""
    return statistics.fmean(block.means(block.own)[rank] for block in blocks)


def _why_none_kept(experiment: Experiment) -> str:
    if experiment.loader_workers:
        return "worker processes could not read the data set, or there is too little memory for them"
    return "there was no memory for the batches" if experiment.memory else "the loader gave no kept batches"


def _step_of(block: Evidence, condition: Condition) -> float:
    """Seconds of a usual step, without what giving kept batches took. Of ranks that run free, the slowest counts."""
    kept = () if condition.experiment.loader_workers else condition.experiment.kept_batches
    data = block.stage("data")
    saved = block.gain(lambda r, n: block.own[r][n] - (data[r][n] if r in kept else 0.0)) if kept else 0.0
    if not condition.reduce:
        seconds = block.mean([max(one.seconds[n] for one in block.ranks) for n in range(block.count)])
        return seconds - saved
    return block.seconds - saved


def _told_apart(findings: Sequence[Finding], least: float) -> list[Finding]:
    """Findings in order of price. `exposed_communication` keeps only the part that no more special cause explains."""
    exposed = next((one for one in findings if one.cause == "exposed_communication"), None)
    # Without a search for unused parameters DDP also sorts its buckets, so that more of them overlap.
    of_their_own = ("no_overlap", "slow_link", "find_unused_parameters", "buffer_broadcast")
    special = [one for one in findings if one.cause in of_their_own and one.status == "proved"]
    found = [one for one in findings if one is not exposed]
    tiny = next((one for one in findings if one.cause == "small_batch"), None)
    if exposed is not None and tiny is not None:  # all of it is latency, which the batch is too small for
        found[found.index(tiny)] = replace(tiny, seconds=max(tiny.seconds, exposed.seconds))
    elif exposed is not None and special:
        # Without reduction DDP broadcasts no buffers either.
        buffers = sum(one.seconds for one in special if one.cause == "buffer_broadcast")
        rest = (
            exposed.seconds
            - buffers
            - max((one.seconds for one in special if one.cause != "buffer_broadcast"), default=0)
        )
        if rest >= least and exposed.low is not None and exposed.high is not None:
            share = rest / exposed.seconds
            text = f"{exposed.text}; this is what {special[0].cause} leaves of it"
            low, high = exposed.low * share, exposed.high * share
            found.append(replace(exposed, seconds=rest, low=low, high=high, text=text))
    elif exposed is not None:
        found.append(exposed)
    return sorted(found, key=lambda one: -one.seconds)
