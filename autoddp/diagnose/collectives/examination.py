"""The course of a diagnosis of what a script communicates by itself: suspicions, then the replays that price them.

    diagnosis = examined(recording, cores, replay)

`replay` does programs again, in turns, in processes of autoddp's own; see `wire.replayed_calls`. The script has ended
by then, so nothing of it is touched, and nothing of it can be.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from autoddp.diagnose.collectives.cause import Job, Suspicion
from autoddp.diagnose.collectives.causes import suspicions
from autoddp.diagnose.collectives.findings import CommunicationDiagnosis
from autoddp.diagnose.collectives.program import Script, are_before_the_steps, can_be_done, script_of
from autoddp.diagnose.collectives.recording import Call, Place, Process, Recording
from autoddp.diagnose.collectives.standing import SILENCE, where_ranks_stand
from autoddp.diagnose.collectives.steps import steps_of
from autoddp.diagnose.collectives.table import before_different_calls, different_calls, table
from autoddp.diagnose.findings import WORTHWHILE, Finding
from autoddp.timing import difference
from autoddp.units import duration, milliseconds, percent, ranks_text
from autoddp.wire.replayed_calls import Program, Replayed

Replays = Callable[[dict[str, Program]], Replayed | str]
"""Does programs again; how long each took, or why it could not."""
_AS_WRITTEN = "as written"
_UNLIKE = 0.25  # share by which the steps as written may differ when they are done again
_ALIKE = 0.1  # share by which calls may differ when they are done again, and nothing is said of it
_LEAST, _MOST = 0.4, 1.25  # times that a difference in the calls of the replay counts at the pace of the script
_UNLIKE_STEPS = "steps took another time when they were done again"
_PASSES_GRADIENTS = "torch.distributed.nn.functional"
_A_ROUND = 12.0  # seconds of all programs together: three rounds, at least, have to come to their end within a minute


def examined(
    recording: Recording,
    cores: int,
    replay: Replays,
    say: Callable[[str], None],
    rates: Mapping[str, float] | None = None,
    still: float = 0.0,
) -> CommunicationDiagnosis:
    """Why the communication of a recorded script takes as long as it does.

    `cores`, `rates`: see `Job`. `still`: seconds from the last call of any rank to the end of the script.
    """
    steps = steps_of(recording)
    rows = table(recording)
    different = different_calls(recording)
    alike = before_different_calls(recording) if different else recording
    script = script_of(alike, steps) if alike is not None and not recording.in_threads else None
    job = Job(recording, steps, rows, script, cores, rates or {})
    suspected = [_with_fix(one, job) for one in suspicions(job) if one.guess >= WORTHWHILE * job.step]
    again: Replayed | str = "nothing that all ranks do together was recorded"
    if script is not None:
        programs = _programs_in_time(suspected, script)
        if others := recording.other_backends:
            again = f"its calls go by {' and '.join(others)}, and autoddp does calls again by Gloo and NCCL alone"
        elif recording.missing:
            again = "not all ranks were recorded on this host"
        elif len(programs) > 1:
            say(f"doing {milliseconds(script.seconds)} ms of the calls again, as written and changed")
            again = replay(programs)
    if isinstance(again, str):
        suspected = [replace(one, changed=None, why_not=one.why_not or again) for one in suspected]
        again, replayed = Replayed({}, {}), ""
    else:
        replayed = _replayed(job, again)
    judged = [finding for one in suspected if (finding := _judged(one, job, again)) is not None]
    findings = [one for one in judged if one.low is None or one.low > 0]
    undecided = [one for one in judged if one not in findings]
    tried = {*again.seconds, *(one.cause for one in suspected if one.measured is not None)}
    stand = []
    if still >= SILENCE and (where := where_ranks_stand(recording)):
        stand = [f"In the last {duration(still)} no rank called anything: {where}"]
    findings.sort(key=lambda one: (one.status != "proved", one.cause not in tried, -one.seconds))
    return CommunicationDiagnosis(
        steps=steps,
        recording=recording,
        rows=rows,
        findings=findings,
        not_measured=_not_measured(job, different, undecided),
        verdict=[*stand, *_verdict(job, findings, undecided)],
        replayed=replayed,
    )


def _with_fix(one: Suspicion, job: Job) -> Suspicion:
    """The suspicion; where torch's own code makes the calls of its lines, these have none that could be changed.

    A line of an installed package may serve all of a job.
    """
    if not one.lines or not one.fix.startswith(f"{one.lines[0]}: "):
        return one
    made_in = {line: modules for line in one.lines if (modules := _made_in(line, job))}
    if one.lines[0] in made_in:
        return replace(one, fix=_only_leads([one.lines[0]], made_in))
    fix, installed = one.fix, {_installed(place.file) for place in _places_at(one.lines[0], job)}
    if installed and "" not in installed:
        is_in = f"{one.lines[0]} is in {' and '.join(sorted(installed))}, which is installed"
        fix = f"{is_in}: look for an option of it first, else change {fix}"
    return replace(one, fix=f"{fix}. But {_only_leads([*made_in], made_in)}" if made_in else fix)


def _only_leads(lines: Sequence[str], made_in: Mapping[str, str]) -> str:
    modules = " and ".join(dict.fromkeys(made_in[line] for line in lines))
    if modules == _PASSES_GRADIENTS:
        return (
            f"the calls of {' and '.join(lines)} are those of {modules}, through which gradients pass: call its "
            "functions fewer times, with one tensor of all (torch.cat), and put none of torch.distributed in their "
            "place"
        )
    leads = "only leads" if len(lines) == 1 else "only lead"
    return (
        f"{' and '.join(lines)} {leads} to these calls: they are made in {modules}, and only options there change them"
    )


def _made_in(line: str, job: Job) -> str:
    """The modules of torch that make all calls of the line; "" where it makes one by itself."""
    by = {place.by for place in _places_at(line, job)}
    return "" if "" in by else " and ".join(sorted({_module(file) for file in by}))


def _places_at(line: str, job: Job) -> list[Place]:
    sums = (place for process in job.recording.processes for place in process.sums)
    return [place for place in sums if place.group is not None and place.where == line]


def _installed(file: str) -> str:
    """The module of an installed package that has the file, such as deepspeed.comm.torch; "" where it is the user's."""
    found = re.search(r"(?:site|dist)-packages/(.+)\.py$", file)
    return found.group(1).replace("/", ".") if found else ""


def _module(file: str) -> str:
    """The public module of torch that has the file: torch.distributed.fsdp for "distributed/fsdp/_runtime_utils.py"."""
    parts = itertools.takewhile(lambda part: not part.startswith("_"), file.removesuffix(".py").split("/"))
    return ".".join(("torch", *parts))


def _programs_in_time(suspected: Sequence[Suspicion], script: Script) -> dict[str, Program]:
    """The script as written, and changed: what may cost most first, and no more than there is time for."""
    by_guess = [_programs(one) for one in sorted(suspected, key=lambda one: -one.guess)]
    changes = [*(one for of_it in by_guess for one in of_it[:1]), *(one for of_it in by_guess for one in of_it[1:])]
    room = max(2, int(_A_ROUND / max(script.seconds, 1e-9)))
    return {name: one.program for name, one in [(_AS_WRITTEN, script), *changes][:room]}


def _programs(one: Suspicion) -> list[tuple[str, Script]]:
    found = [] if one.changed is None else [(one.cause, one.changed)]
    return found + [(f"{one.cause}: {words}", script) for words, script in one.beside]


def _suspected(one: Suspicion, why: str) -> Finding:
    return Finding(
        one.cause,
        one.ranks,
        one.guess,
        None,
        None,
        "suspected",
        f"{one.seen}. Not tried: {why}",
        one.fix,
        one.lines,
    )


def _judged(one: Suspicion, job: Job, again: Replayed) -> Finding | None:
    """What the replay says of a suspicion; None where it refutes it."""
    script, unit, rounds = job.script, job.steps.unit, again.seconds
    if one.measured is not None:
        return _priced(one, job, *one.measured, f"{one.seen}. In the running script, in turns, a {unit} takes")
    changed = rounds.get(one.cause)
    if changed is None or script is None:
        why_not = "nothing of it can be done again" if one.changed is None else "steps are too long to try all changes"
        return _suspected(one, one.why_not or why_not)
    before, after = ([seconds / script.covers for seconds in of_it] for of_it in (rounds[_AS_WRITTEN], changed))
    beside = [
        (statistics.fmean(seconds) / script.covers, words)
        for words, _ in one.beside
        if (seconds := rounds.get(f"{one.cause}: {words}"))
    ]
    seen = f"{one.seen}. Done again by processes of autoddp's own, a {unit} takes"
    counts, why = _counts(one, job, again)
    found = _priced(one, job, before, after, seen, beside, counts, why)
    if found is None and _apart(job, rounds[_AS_WRITTEN]) > _UNLIKE:
        # What was done again is not what the script does: that refutes nothing. It is told under `not_measured`.
        return replace(_suspected(one, _UNLIKE_STEPS), low=0.0, high=one.guess)
    if found is not None and _apart(job, rounds[_AS_WRITTEN]) > _UNLIKE:
        took = milliseconds(script.seconds / script.covers)
        uncertain = f"{found.text}. Most {unit}s of the script itself take {took} ms, so the price is uncertain"
        found = replace(found, status="suspected", text=uncertain)
    if found is not None and found.low is not None and found.high is not None and found.seconds < one.least:
        text = f"{found.text}. In the script it takes {milliseconds(one.least)} ms at least"
        found = replace(found, seconds=one.least, high=max(found.high, one.least), text=text)
    if found is not None and found.low is not None and not one.is_bounded and found.seconds > job.step:
        # A replay that takes a little longer than the script counts in part as it is.
        found = replace(found, seconds=job.step, low=min(found.low, job.step), high=job.step)
    saved = _saved_in_gaps(script, one.changed)
    most = one.guess if one.shortens_gaps else min(one.guess + min(saved.values()), _least_in_calls(job, saved))
    if found is not None and found.low is not None and one.is_bounded and found.seconds > most:
        # Where ranks have to share cores, what they do again at once may hold them up more than in the script.
        text = f"{found.text}. In the script it takes {milliseconds(most)} ms at most"
        if found.low > most:
            text = f"{text}, so the price is uncertain"
            found = replace(found, seconds=most, low=None, high=None, status="suspected", text=text)
        else:
            found = replace(found, seconds=most, high=most, text=text)
    return found


def _saved_in_gaps(script: Script, changed: Script | None) -> dict[int, float]:
    """Rank → seconds of a step that it computes and sleeps less with a change: fewer calls have fewer gaps."""

    def of_gaps(one: Script, rank: int) -> float:
        return sum(played.act.computes + played.act.sleeps for played in one.played.get(rank, ()))

    after = script if changed is None else changed
    steps = script.covers / script.pace
    return {rank: max(0.0, of_gaps(script, rank) - of_gaps(after, rank)) / steps for rank in script.played}


def _least_in_calls(job: Job, saved: Mapping[int, float]) -> float:
    """Seconds of a step that a change of calls can save: what every rank of those that wait for each other can.

    A step takes each of them as long: its gaps and its calls. Without any of the calls the gaps are left, but for what
    is `saved` of them and for waits for a core. So no more is saved than that of the rank for which this is least.
    """
    stands: dict[int, float] = {}
    for rank, process in job.recording.of_rank.items():
        share = process.share_in_calls
        # Between its calls it may wait for a core that another rank's calls use.
        stands[rank] = job.step * (share + (1.0 - share) * process.waits_in_gaps) + saved.get(rank, 0.0)
    return _least(job.recording, stands)


def _least(recording: Recording, stands: Mapping[int, float]) -> float:
    """The least of ranks that wait for each other; of those that never meet, that of the ranks for which it is most."""
    known = [[stands[rank] for rank in ranks if rank in stands] for ranks in recording.apart]
    return max((min(of_ranks) for of_ranks in known if of_ranks), default=0.0)


def _counts(one: Suspicion, job: Job, again: Replayed) -> tuple[float, str]:
    """How much of a difference in the replay counts in the script, and a sentence about it; "" where nearly all does.

    Where cores are short, calls may take longer in the replay than in the script, and then a change saves more of them
    there. The gaps are the same on both sides. So if a step takes longer in the replay, or less, its calls do, and the
    price of a change of calls is in proportion to them. If a change shortens gaps too, it is in proportion to the step.
    But one machine is not as quick at all times, and the job goes on at either pace. So if they do not differ much, it
    is the mean of the price now and the price at the pace of the script.
    What is done again takes as long as most steps, and all steps take longer on average: that counts in full.
    """
    assert job.script is not None
    took = statistics.fmean(again.seconds[_AS_WRITTEN]) / job.script.covers
    step = min(job.step, job.script.seconds / job.script.covers)
    if not took or not step:
        return 1.0, ""
    counts = min(step / took, _MOST)
    if one.is_bounded and not one.shortens_gaps:
        called = again.in_calls.get(_AS_WRITTEN, ())
        # A rank that calls nothing in these steps meets the others in other steps.
        ranks = [rank for rank, of_rank in job.script.played.items() if of_rank and rank < len(called)]
        in_calls = _least(job.recording, {rank: called[rank] for rank in ranks}) / job.script.covers
        counts = min(max(1 - (took - step) / in_calls, _LEAST), _MOST) if in_calls else 1.0
    if _apart(job, again.seconds[_AS_WRITTEN]) <= _UNLIKE:
        counts = (1 + counts) / 2
    counts *= _usual_step(job) / step
    if abs(counts - 1) <= _ALIKE:
        return counts, ""
    in_script = f"In the script a {job.steps.unit} takes {milliseconds(_usual_step(job))} ms on average"
    return counts, f"{in_script}, so {percent(counts)} of that difference counts"


def _priced(
    one: Suspicion,
    job: Job,
    before: Sequence[float],
    after: Sequence[float],
    seen: str,
    beside: Sequence[tuple[float, str]] = (),
    counts: float = 1.0,
    why: str = "",
) -> Finding | None:
    """What a suspicion costs, by seconds of a step as written and changed; None where it is not worth while.

    `counts`, `why`: see `_counts`.
    """
    price = difference(before, after)
    least = WORTHWHILE * _usual_step(job)
    if price.seconds * counts < least and (price.low > 0 or price.high * counts < least):
        return None  # where it may be worth while, nothing is refuted
    changed = [(statistics.fmean(after), one.tried), *beside]
    others = "; ".join(f"{milliseconds(seconds)} ms with {words}" for seconds, words in changed)
    return Finding(
        one.cause,
        one.ranks,
        price.seconds * counts,
        price.low * counts,
        price.high * counts,
        "proved" if price.sure else "suspected",
        f"{seen} {milliseconds(statistics.fmean(before))} ms as written and {others}{f'. {why}' if why else ''}",
        one.fix,
        one.lines,
    )


def _usual_step(job: Job) -> float:
    """Seconds of a step without the pauses of the script, such as an evaluation, or a look at where results are used.

    What was done again has none of these.
    """
    script = job.script
    return job.step if script is None else min(job.step, script.seconds * script.pace / script.covers)


def _apart(job: Job, as_written: Sequence[float]) -> float:
    """By which share the replay of the steps as written differs from the script."""
    assert job.script is not None
    return abs(statistics.fmean(as_written) / job.script.seconds - 1) if job.script.seconds else 0.0


def _replayed(job: Job, again: Replayed) -> str:
    assert job.script is not None
    took = statistics.fmean(again.seconds[_AS_WRITTEN]) / job.script.covers
    return (
        f"most {job.steps.unit}s took {milliseconds(job.script.seconds / job.script.covers)} ms in the script and "
        f"{milliseconds(took)} ms when their calls were done again"
    )


def _not_measured(job: Job, different: str, undecided: Sequence[Finding]) -> list[str]:
    recording = job.recording
    found = [different] if different else []
    if recording.in_threads:
        found.append(f"what calls cost: threads of {ranks_text(recording.in_threads)} make some while others go on")
    if missing := recording.missing:
        found.append(
            f"{ranks_text(missing)}: not on this host, or {'it has' if len(missing) == 1 else 'they have'} called "
            "nothing"
        )
    if recording.beside:
        others = "another process calls" if len(recording.beside) == 1 else f"{len(recording.beside)} others call"
        found.append(f"what {others}, in a world of its own beside that of the ranks")
    found += [_undecided(one, job.steps.unit) for one in undecided]
    if hidden := _hidden(recording):
        found.append(f"what {hidden} may communicate: it counts as time between the calls")
    if _on_device(recording):
        found.append("how long the GPU itself is in a call: the times are those of the lines of the script")
    if later := sum(map(_never_waited_for, recording.processes)):
        calls = "1 call" if later == 1 else f"{later} calls"
        found.append(f"the end of {calls} for which the script has not waited by Work.wait()")
    share, what = _not_done_again(recording)
    if share >= WORTHWHILE:
        of_time = f"up to {percent(min(1.0, share))} of the time of a rank"
        found.append(f"what {' and '.join(what)} cost, {of_time}: such calls are not done again")
    return found


def _hidden(recording: Recording) -> str:
    """What communicates past the recording, as a part of a sentence; "" for nothing."""
    return " and ".join(sorted(frozenset[str]().union(*(one.hidden for one in recording.processes))))


def _undecided(one: Finding, unit: str) -> str:
    """What is said of a cause that the replay has neither proved nor refuted."""
    assert one.low is not None
    assert one.high is not None
    most, why = f"{milliseconds(one.low)} to {milliseconds(one.high)}", "the rounds differed too much"
    if one.text.endswith(_UNLIKE_STEPS):
        most, why = f"up to {milliseconds(one.high)}", _UNLIKE_STEPS
    return f"whether {one.cause} costs anything: {most} ms per {unit}, because {why} ({', '.join(one.lines)})"


def _never_waited_for(process: Process) -> int:
    """Calls for whose end the script does not wait. Those behind the last wait of their line go on at the end."""
    last = {call.place: call.began for call in process.calls if call.wait_ended}
    return sum(
        not call.wait_ended and not call.is_blocking and call.began < last.get(call.place, process.calls[-1].began)
        for call in process.calls
        if call.place.group is not None
    )


def _not_done_again(recording: Recording) -> tuple[float, list[str]]:
    """The largest share of a rank's time in calls that cannot be done again, such as sends, and their functions."""
    return _largest_share(recording, lambda place: not can_be_done(place))


def _largest_share(recording: Recording, counts: Callable[[Place], bool]) -> tuple[float, list[str]]:
    """The largest share of a rank's time in calls of the places that count, and their functions.

    Ranks of one row of the table may take unlike times in it, so the rows do not tell it.
    """
    shares, what = [0.0], set[str]()
    for process in recording.of_rank.values():
        of_it = {place: one for place, one in process.sums.items() if place.group and counts(place)}
        shares.append(sum(one.seconds for one in of_it.values()) / (process.seconds or 1.0))
        what |= {place.collective for place in of_it}
    return max(shares), sorted(what)


def _calls(recording: Recording) -> Iterator[Call]:
    """All calls of groups, also those from one rank to another."""
    return (call for one in recording.of_rank.values() for call in one.calls if call.place.group is not None)


def _waits(job: Job) -> float:
    """The largest share of a rank's time in which it waits for others, as far as that is known."""
    of_ranks = (sum(row.waiting or 0.0 for row in job.rows if rank in row.ranks) for rank in job.recording.ranks)
    return max(of_ranks, default=0.0)


def _on_device(recording: Recording) -> bool:
    """Whether a call moves what lies on a GPU: then its line only starts it, and the GPU waits."""
    return any(place.device not in ("cpu", "") for one in recording.processes for place in one.sums)


def _verdict(job: Job, findings: Sequence[Finding], undecided: Sequence[Finding]) -> list[str]:
    """At most three lines, the answer first."""
    steps, recording = job.steps, job.recording
    share, _ = _largest_share(recording, lambda place: True)
    seen = " that was seen" if _hidden(recording) else ""
    lines = []
    if findings:
        first = findings[0]
        saves = f"{milliseconds(first.seconds)} of {milliseconds(job.step)} ms per {steps.unit}"
        if first.status == "proved":
            lines.append(f"Mending {first.cause} saves {saves} ({percent(first.seconds / job.step)}): {first.fix}")
        else:
            at_most = milliseconds(min(job.step, first.seconds if first.high is None else first.high))
            up_to = f"up to {at_most} of {milliseconds(job.step)} ms per {steps.unit}"
            lines.append(f"Suspected: {first.cause}, {up_to}: {first.fix}")
        if len(findings) > 1:
            others = [f"{one.cause} ({milliseconds(one.seconds)} ms, {one.status})" for one in findings[1:]]
            lines.append(f"Also: {', '.join(others)}")
    elif not any(place.group for place in recording.often):
        of_time = f"in the {duration(recording.seconds)} that were recorded"
        lines.append(f"Nothing is known: {of_time} no collective was called more than twice")
    elif are_before_the_steps(_calls(recording), recording, steps):
        but = f"; what {_hidden(recording)} may communicate is not seen" if seen else ""
        lines.append(f"No call was seen in the steps: all were made before the first of them{but}")
    elif (job.script is None or recording.missing) and share >= WORTHWHILE:
        lines.append("Nothing is known of what the calls cost: see what was not measured")
    elif (untried := _not_done_again(recording))[0] >= WORTHWHILE:
        sure = " for sure" if undecided else ""
        what = " and ".join(untried[1])
        lines.append(f"Nothing is known of what {what} cost, and nothing found{sure} in the other calls")
    elif undecided:
        names = " and ".join(dict.fromkeys(one.cause for one in undecided))
        lines.append(f"Nothing found for sure: it could not be told what {names} cost, see what was not measured")
    else:
        # Not that it costs little: it may be all that the ranks do, and none of it needless.
        lines.append(f"Nothing found in the communication{seen} whose mending would save 3 % of a {steps.unit}")
    most = f"up to {percent(min(1.0, share))}"
    of_time = f"{most} of the time of a rank is communication{seen}"
    if _on_device(recording):
        of_time = f"lines that communicate take {most} of a rank's time; how long the GPU is in them is not seen"
    elif not findings and (waits := min(share, _waits(job))) >= WORTHWHILE:
        of_time = f"{of_time}, {percent(waits)} waiting for ranks that come later"
    takes = "" if steps.unit == "second" else f"; a {steps.unit} takes {milliseconds(job.step)} ms"
    lines.append(f"{of_time}{takes} ({steps.how})")
    return lines
