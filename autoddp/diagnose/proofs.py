"""The proof of each suspicion: an experiment in rounds, and what its blocks say.

prover = Prover(rounds, surroundings, fails, ends)
proof = prover.prove(suspicion, evidence, until=20.0)
while proof.is_open and proof.again is not None:
    proof = prover.further(proof)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autoddp import codec
from autoddp.diagnose.cause import Surroundings, Suspicion
from autoddp.diagnose.events import priced_by_events
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Dose, Events, Mend, Probe, Repeat
from autoddp.diagnose.findings import WORTHWHILE
from autoddp.diagnose.rounds import CannotRun, Rounds
from autoddp.diagnose.signs import waits_for_a_core
from autoddp.timing import Difference, difference
from autoddp.units import data_size, milliseconds
from autoddp.wire import Experiment

_STARVED = 0.5  # share of the rate that is due, below which a link is called slow
_MOST_ROUNDS = 24  # where fewer neither prove nor refute anything
_HARDLY = 0.25  # of the lateness: on a busy machine ranks are late for other reasons too, also one at a time
_BY_ITSELF = "make the work of each step alike: it depends on chance, or on what came before"
_BY_ITSELF_OR_DATA = f"{_BY_ITSELF}, or on the data of the step"
_CRITICAL = 0.5  # seconds that a step grows by for each second of delay, from which all ranks wait for the delayed one


@dataclass(frozen=True)
class Proof:
    """What an experiment has given for a suspicion; `price` is None where there was none."""

    price: Difference | None
    text: str
    mended: Condition | None = None
    """How the job ran without the cause, as far as its fix can take it away."""
    against: Condition = field(default_factory=Condition)
    """How it ran with the cause."""
    by_fix: bool | None = None
    """Whether `Suspicion.fix` is worth while, and not what else it names.

    None where that is not known: the fix was not tried, or gives little.
    """
    advice: str = ""
    """What to change, where the experiment has shown that it is none of what the suspicion names."""
    share: float = 1.0
    """The part of what `mended` gives that mending this cause would give."""
    blocks: Sequence[Evidence] = ()
    """Blocks measured under `mended`."""
    is_open: bool = False
    """Whether the blocks so far neither prove nor refute the suspicion."""
    again: Callable[[], Proof] | None = None
    """Measures some more blocks, and gives what they and those before them say; None where more would say the same."""
    takes: float = 0.0
    """Seconds that `again` takes."""


_Judge = Callable[[Sequence[Evidence], Sequence[Evidence]], Proof]
"""What blocks under two conditions say."""


class Prover:
    """Tries suspicions on one running job.

    `fails`: the exception of a block that cannot run. `ends`: that of a job that is over. `reduction`: what steps
    without reduction save, where that has been measured before.
    """

    def __init__(
        self,
        rounds: Rounds,
        surroundings: Surroundings,
        fails: type[Exception],
        ends: type[Exception],
        reduction: Difference | None = None,
    ) -> None:
        self.over = ""
        """Why no further block can be measured; "" if it can."""
        self.alone: Sequence[Evidence] = ()
        """Blocks in which each rank computed for itself."""
        self._rounds = rounds
        self._around = surroundings
        self._fails = fails
        self._ends = ends
        self._reduction = reduction
        self._until = rounds.budget
        self._off: Proof | None = None

    def prove(self, suspicion: Suspicion, evidence: Evidence, until: float) -> Proof:
        """What an experiment says of the suspicion. No round begins when `rounds.spent` is over `until`."""
        if self.over:
            return Proof(None, self.over)
        self._until = until
        try:
            match suspicion.proof:
                case Events() as events:
                    return self._by_events(events, evidence)
                case Mend() as mend:
                    return self._as_fixed(suspicion, mend)
                case Probe() as probe:
                    return self._probed(probe)
                case Dose() as dose:
                    return self._dosed(dose)
                case Repeat() as repeat:
                    return self._repeated(repeat)
        except self._fails as failed:
            return Proof(None, f"the script fails in that experiment: {failed}")
        except CannotRun as impossible:
            return Proof(None, str(impossible))
        except self._ends as over:
            self._ended(over)
            return Proof(None, self.over)
        return Proof(None, suspicion.why_not or "no experiment is known for it")

    def further(self, proof: Proof) -> Proof:
        """The proof after more blocks."""
        assert proof.again is not None
        try:
            return proof.again()
        except (self._fails, CannotRun):
            return replace(proof, again=None)
        except self._ends as over:
            self._ended(over)
            return proof

    def _ended(self, over: Exception) -> None:
        self.over = f"the script ended before: {over}"

    def _by_events(self, events: Events, evidence: Evidence) -> Proof:
        price = priced_by_events(evidence, events)
        if price is not None:
            # Other steps than those of the record that the price is a part of: events may have become longer since.
            price = price.times(min(1.0, self._rounds.step / max(1e-9, evidence.seconds + price.seconds)))

        def again() -> Proof:
            further = self._by_events(events, self._rounds.record_steps())
            # More steps on a busy machine may not tell these apart any more; those before have been seen all the same.
            return replace(proof, again=None) if further.price is None and price is not None else further

        few = "" if price else "too few of these steps were seen to give an interval"
        takes = self._rounds.recording_takes
        proof = Proof(price, few, is_open=price is None or self.is_open(price), again=again, takes=takes)
        return proof

    def _as_fixed(self, suspicion: Suspicion, mend: Mend) -> Proof:
        """Measure the mended script, and the fix itself, where that is known to give less."""
        fixed = suspicion.fixed
        try:
            proof = self._mended(mend)
        except (self._fails, CannotRun):
            if fixed is None or fixed.mended.experiment.memory == mend.mended.experiment.memory:
                raise
            return _with_words(self._mended(fixed), f"proved with {suspicion.tried}", by_fix=True)
        price = proof.price
        if fixed is None or price is None or not self.is_finding(price):
            return proof
        what = _shorter(suspicion, price)
        try:
            by_fix = self._mended(fixed)
        except CannotRun as impossible:
            return _at_most(suspicion, proof, f"{suspicion.tried} were not tried: {impossible}")
        except self._fails as failed:
            return _at_most(suspicion, proof, f"the script fails with {suspicion.tried}: {failed}")
        except self._ends as over:
            self._ended(over)
            return _at_most(suspicion, proof, f"{suspicion.tried} were not tried: {self.over}")
        assert by_fix.price is not None
        if self.is_finding(by_fix.price):
            most_of_it = by_fix.price.seconds > price.seconds / 2
            return _with_words(by_fix, f"proved with {suspicion.tried}; {what}", most_of_it or None, price)
        if self.is_open(by_fix.price):
            return _at_most(suspicion, proof, f"{suspicion.tried} were tried, but the rounds differed too much")
        return _at_most(suspicion, proof, f"{suspicion.tried} were tried and save next to nothing", by_fix=False)

    def is_finding(self, price: Difference) -> bool:
        """Whether it is surely more than nothing, and worth while."""
        return price.sure and price.seconds >= WORTHWHILE * self._rounds.step

    def _mended(self, mend: Mend) -> Proof:
        """The script as written, or as `against`, in turns with the script mended: A B B A A B …"""
        mended, against = mend.mended, mend.against
        is_off = mended == Condition(reduce=False)
        if is_off and self._off is None and self._reduction is not None:
            self._off = Proof(self._reduction, "", mended, is_open=self.is_open(self._reduction))
        if is_off and self._off is not None and not self._off.is_open:
            return self._off
        if mended.experiment.kept_batches:
            self._rounds.keep(mended.experiment.kept_batches)
        if mend.even:
            mended = replace(mended, experiment=codec.replace(mended.experiment, sizes=self._rounds.sizes))

        def judge(before: Sequence[Evidence], after: Sequence[Evidence]) -> Proof:
            as_written = [step_of(b, against) for b in before]
            price = self._of_a_step(difference(as_written, [step_of(b, mended) for b in after]), as_written)
            if is_off:
                self.alone = after
            return Proof(price, "", mended, against, blocks=after, is_open=self.is_open(price))

        proof = self._in_turns_until_sure((against, mended), judge)
        if is_off:
            self._off = proof
        return proof

    def _of_a_step(self, price: Difference, as_written: Sequence[float]) -> Difference:
        """The price for a step of the record. On a busy machine later steps may take much longer, and save more."""
        if price.seconds <= self._rounds.step:
            return price
        return price.times(self._rounds.step / statistics.fmean(as_written))

    def _in_turns_until_sure(self, conditions: tuple[Condition, Condition], judge: _Judge) -> Proof:
        """Rounds of two conditions until `judge` finds them sufficient, or the time for this suspicion is over."""
        first: list[Evidence] = []
        second: list[Evidence] = []

        def again() -> Proof:
            began = self._rounds.spent
            more = self._rounds.in_turns(*conditions)
            first.extend(more[0])
            second.extend(more[1])
            return replace(judge(first, second), again=again, takes=self._rounds.spent - began)

        proof = again()
        while proof.is_open and len(first) < _MOST_ROUNDS and self._can_turn(*conditions):
            proof = again()
        return proof

    def is_open(self, price: Difference) -> bool:
        """Whether nothing is proved, and nothing refuted."""
        return price.low <= 0 < WORTHWHILE * self._rounds.step < price.high

    def _can_turn(self, *conditions: Condition) -> bool:
        """Whether some more rounds fit into the time of this suspicion and into the budget."""
        return self._rounds.spent < self._until and bool(self._rounds.plans(*conditions))

    def _probed(self, probe: Probe) -> Proof:
        """A delay on the rank that all are said to wait for: if they do, each step grows by as much."""
        delay = probe.delay

        def judge(as_written: Sequence[Evidence], delayed: Sequence[Evidence]) -> Proof:
            grows = difference([block.seconds for block in delayed], [block.seconds for block in as_written])
            slope = grows.times(1 / delay.seconds)
            grown = (
                f"a delay of {milliseconds(delay.seconds)} ms there made a step {milliseconds(grows.seconds)} ms longer"
            )
            if slope.high < _CRITICAL:
                # The rank's own time grows by the delay, unless it waited there itself, as for a thread of its own.
                longer = _own(delayed, delay.rank) - _own(as_written, delay.rank)
                if longer >= _CRITICAL * delay.seconds:
                    return Proof(Difference(0.0, 0.0, 0.0), f"{grown}: the other ranks do not wait for it")
                waits = (
                    "the rank itself waits for something that goes on meanwhile, such as a thread that loads batches"
                )
                if grows.seconds <= 0:  # by what else happens on the machine
                    grown = f"a delay of {milliseconds(delay.seconds)} ms there made no step longer"
                advice = (
                    f"make what rank {delay.rank} waits for there, such as a thread or a queue that gives it batches, "
                    "as fast as on the others"
                )
                return Proof(None, f"{grown}, because {waits}", advice=advice)
            if slope.low < _CRITICAL:
                return Proof(None, f"{grown}, but the rounds differed too much to be sure", is_open=True)
            prices = [probe.gain(block) for block in as_written]
            price = self._of_a_step(difference(prices, [0.0] * len(prices)), [block.seconds for block in as_written])
            text = (
                f"proved by a delay of {milliseconds(delay.seconds)} ms there, which made each step of all ranks "
                f"{milliseconds(grows.seconds)} ms longer"
            )
            return Proof(price, text)

        return self._in_turns_until_sure((Condition(), Condition(experiment=Experiment(delay=delay))), judge)

    def _repeated(self, repeat: Repeat) -> Proof:
        """One batch again and again on each rank: ranks that are late by turns because of their data are so no more.

        If they are, or where no batch can be repeated, one rank at a time makes its steps.
        """
        if not repeat.ranks:
            return self._one_at_a_time()

        def settled(repeated: Proof) -> Proof:
            again = repeated.again
            if repeated.is_open and again is not None:
                return replace(repeated, again=lambda: settled(again()))
            if repeated.by_fix is not False:
                return repeated
            try:
                return self._one_at_a_time(repeated)
            except (self._fails, CannotRun) as impossible:
                return _at_least(repeated, str(impossible))
            except self._ends as over:
                self._ended(over)
                return _at_least(repeated, self.over)

        return settled(self._with_one_batch(repeat))

    def _with_one_batch(self, repeat: Repeat) -> Proof:
        """Each rank's waiting as written, and with one batch again and again."""
        self._rounds.keep(repeat.ranks)
        one = Experiment(kept_batches=repeat.ranks, sizes=self._rounds.sizes[:1])

        def judge(as_written: Sequence[Evidence], repeated: Sequence[Evidence]) -> Proof:
            before, after = _least_waiting(as_written), _least_waiting(repeated)
            price, whole = difference(before, after), difference(before, [0.0] * len(before))
            what = "each rank is given one batch again and again"
            if price.low > whole.seconds / 2:
                return Proof(price, f"proved: they hardly wait when {what}, so it is in the data", by_fix=True)
            if price.high < whole.seconds / 2:
                return Proof(whole, f"proved: they wait as well when {what}, so it is not the data", by_fix=False)
            return Proof(None, f"{what}, but the rounds differed too much to be sure", is_open=True)

        return self._in_turns_until_sure((Condition(), Condition(experiment=one)), judge)

    def _one_at_a_time(self, known: Proof | None = None) -> Proof:
        """Each rank makes its steps while the others stand still, and then what they share makes none late.

        Whoever comes first to what they share waits for nobody. So it costs all that the last rank of a step is later
        than the first one, and not only what ranks wait on average. `known`: what was found until then, if it is not
        the data.
        """
        by_turns = self._rounds.one_at_a_time

        def judge(as_written: Sequence[Evidence], alone: Sequence[Evidence]) -> Proof:
            late = [block.late for block in as_written]
            price, whole = difference(late, [block.late for block in alone]), difference(late, [0.0] * len(late))
            what = "while one rank at a time makes its steps and the others stand still"
            so_far = f"{known.text}; " if known else "proved: "
            if price.low > whole.seconds / 2:
                return Proof(price, f"{so_far}none is late {what}, so they share something", by_fix=False)
            if max(-price.low, price.high) < _HARDLY * whole.seconds:
                no_core = statistics.fmean(map(waits_for_a_core, alone))
                if no_core >= whole.seconds:  # as long as they are late: nobody can tell it from their own work
                    busy = (
                        f"their steps differ as much {what}, but each waits {milliseconds(no_core)} ms for a core then"
                    )
                    return _at_least(known, busy) if known else Proof(None, busy)
                waits = _least_waiting(as_written)
                text = f"{so_far}their steps differ as much {what}, so it is nothing that they share"
                advice = _BY_ITSELF if known else _BY_ITSELF_OR_DATA
                costs = difference(waits, [0.0] * len(waits))
                return Proof(costs, text, advice=advice, is_open=self.is_open(costs))
            unsure = f"{what}, the rounds differed too much to be sure"
            return replace(_at_least(known, unsure) if known else Proof(None, unsure), is_open=True)

        return self._in_turns_until_sure((Condition(), by_turns), judge)

    def _dosed(self, dose: Dose) -> Proof:
        """The link's rate by what added bytes cost, and what its due rate would leave of the ranks' waiting."""
        around = self._around
        due, _ = around.due
        slow = around.travels(dose.bytes) / (_STARVED * due)  # seconds: what takes longer is a slow link
        added = Condition(experiment=Experiment(added_bytes=dose.bytes))

        def judge(as_written: Sequence[Evidence], more: Sequence[Evidence]) -> Proof:
            cost = difference([block.seconds for block in more], [block.seconds for block in as_written])
            measured = f"{data_size(dose.bytes)} more made a step {milliseconds(cost.seconds)} ms longer"
            if cost.high < slow:
                return Proof(Difference(0.0, 0.0, 0.0), measured)
            if cost.low < slow:
                unsure = f"{measured}, but the rounds differed too much to be sure of the link's rate"
                return Proof(None, unsure, is_open=True)
            return Proof(cost, measured)

        def settled(of_bytes: Proof) -> Proof:
            again = of_bytes.again
            if of_bytes.is_open and again is not None:
                return replace(of_bytes, again=lambda: settled(again()))
            if of_bytes.price is None or not of_bytes.price.sure:
                return replace(of_bytes, again=None)
            rate = around.travels(dose.bytes) / of_bytes.price.seconds
            text = f"proved: {of_bytes.text}, which is {data_size(int(rate))}/s"
            return self._of_faster_link(rate, text, self._mended(Mend(Condition(reduce=False))))

        return settled(self._in_turns_until_sure((Condition(), added), judge))

    def _of_faster_link(self, rate: float, text: str, off: Proof) -> Proof:
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


def _shorter(suspicion: Suspicion, price: Difference) -> str:
    """What `Suspicion.proof` gives, where no fix takes the cause away as thoroughly."""
    return f"{suspicion.most} a step would be {milliseconds(price.seconds)} ms shorter"


def _at_most(suspicion: Suspicion, proof: Proof, end: str, by_fix: bool | None = None) -> Proof:
    """The proof by what no fix can give, told with its price. More blocks give another price, and the words tell it."""
    assert proof.price is not None
    again = proof.again
    further = None if again is None else lambda: _at_most(suspicion, again(), end, by_fix)
    return replace(proof, text=f"{_shorter(suspicion, proof.price)}; {end}", by_fix=by_fix, again=further)


def _with_words(proof: Proof, text: str, by_fix: bool | None = None, most: Difference | None = None) -> Proof:
    """The proof told in other words, also after more blocks.

    `most`: the most that a fix can give. Rounds on a busy machine may say more.
    """
    again = proof.again
    further = None if again is None else lambda: _with_words(again(), text, by_fix, most)
    beyond = most is not None and proof.price is not None and proof.price.seconds > most.high
    return replace(proof, price=most if beyond else proof.price, text=text, by_fix=by_fix, again=further)


def _at_least(proof: Proof, why: str) -> Proof:
    """The proof for ranks that share something, where it is not known how much that costs."""
    return _with_words(proof, f"{proof.text}; mending it gives that at least ({why})", by_fix=False)


def _least_waiting(blocks: Sequence[Evidence]) -> list[float]:
    """Seconds of waiting in each block, of the rank that waits least in all of them together.

    The least of each short block would be less than that. Of ranks that are given one batch again and again, the one
    with the longest hardly waits.
    """
    ranks = range(len(blocks[0].ranks))
    rank = min(ranks, key=lambda r: sum(block.anatomy[r].waiting for block in blocks))
    return [block.anatomy[rank].waiting for block in blocks]


def _own(blocks: Sequence[Evidence], rank: int) -> float:
    """Seconds of a step that this rank needs by itself."""
    return statistics.fmean(block.means(block.own)[rank] for block in blocks)


def step_of(block: Evidence, condition: Condition) -> float:
    """Seconds of a usual step, without what giving kept batches took. Of ranks that run free, the slowest counts."""
    kept = () if condition.experiment.loader_workers else condition.experiment.kept_batches
    data = block.stage("data")
    saved = block.gain(lambda r, n: block.own[r][n] - (data[r][n] if r in kept else 0.0)) if kept else 0.0
    if not condition.reduce:
        seconds = block.mean([max(one.seconds[n] for one in block.ranks) for n in range(block.count)])
        return seconds - saved
    return block.seconds - saved
