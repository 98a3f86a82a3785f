"""The answer of a study on a terminal: what was won and by what, why the job is slow, what to do now; 80 columns.

    for row in answer(outcome, configuration, Ways(recipe="train.autoddp.toml", report="report.html")):
        print(*row.lines(), sep="\n")

Tables of ranks, trials, rungs and unproved causes are in the report, and on the terminal with --verbose.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from autoddp.diagnose import Diagnosis
from autoddp.diagnose.causes import in_words
from autoddp.knobs import Configuration
from autoddp.knobs.computing import OF_CORES
from autoddp.knobs.hook import POWERSGD_START_STEP
from autoddp.log import WIDTH, wrapped
from autoddp.study import Outcome, Standing
from autoddp.units import gradient_error, milliseconds, ratio

_LABEL = 15  # columns
_MOST_OF_A_FIX = 3  # lines
_OWN_PACE = 1.1  # of a step as written: a little more is noise


@dataclass(frozen=True)
class Ways:
    """What the user may do next; each empty where there is nothing to say."""

    recipe: str = ""
    """The file in which the recipe was saved."""
    next_start: str = ""
    """The command that launches with it."""
    report: str = ""
    undo: str = ""
    """The command that trains as before."""


@dataclass(frozen=True)
class Row:
    """A line of the answer, or several where its text is long."""

    label: str
    text: str
    good: bool = False
    """Whether it is a gain, which is green on a terminal that has colours."""
    most: int | None = None
    """Lines at most; the rest is in the report."""

    def lines(self) -> list[str]:
        """The row in at most `WIDTH` columns; a word that is longer than a line stays whole.

        Escape sequences, as in names of files, are shown without effect.
        """
        first, *others = wrapped(self.text, WIDTH - _LABEL - 1, self.most)
        return [f"{self.label:<{_LABEL}} {first}".rstrip(), *(f"{'':<{_LABEL}} {line}" for line in others)]


def answer(outcome: Outcome, configuration: Configuration, ways: Ways) -> list[Row]:
    """The rows for what a study has found and decided. `configuration`: what is launched, start steps included."""
    rows = [*_result(outcome, configuration), *_why_slow(outcome.diagnosis), *_ways(outcome, ways)]
    return [row for row in rows if row.text]


def _result(outcome: Outcome, configuration: Configuration) -> Iterator[Row]:
    launched = outcome.decision.configuration
    standing = next((one for one in outcome.ladder if one.configuration == launched), None)
    before, unit = outcome.figure(outcome.baseline_seconds), outcome.unit
    if not launched or standing is None:
        why = outcome.decision.why.replace(": your settings stay", "", 1)
        is_open = outcome.decision.is_open or why.startswith("undecided: ")
        why = why.removeprefix("undecided: ")
        yield Row("undecided" if is_open else "no gain", f"your settings stay: {before} {unit}")
        yield Row("  because", why.partition("; --allow ")[0])
        yield _limit(outcome)
        return
    gain = standing.speedup
    low, high = ratio(gain.low), ratio(gain.high)
    before = outcome.figure(outcome.before(standing))
    moved = f"{before} → {outcome.figure(standing.seconds)} {unit} (99 % interval: ×{low} to ×{high})"
    better = "faster" if outcome.objective is None else outcome.objective.better
    yield Row(f"×{ratio(gain.ratio)} {better}", moved, good=True)
    yield Row("  by", "; ".join(launched.with_values(**configuration).in_words))  # what has a variable, too
    yield Row("  training", _changes(standing, configuration, outcome))
    yield _limit(outcome)


def _limit(outcome: Outcome) -> Row:
    """What keeps the fastest configuration from being faster still: without text if that is not the loaders."""
    fastest = min(outcome.ladder, key=lambda one: one.seconds, default=None)
    if fastest is None or not fastest.pace or fastest.seconds > fastest.pace:
        return Row("", "")
    # As written too most steps may be shorter than the pace: batches come in bursts, and one long wait moves no median.
    # With other threads it may be the pace of loaders that have no cores left.
    other_cores = any(name in fastest.configuration for name in OF_CORES)
    if other_cores and fastest.pace > _OWN_PACE * outcome.baseline.seconds:
        return Row("", "")
    every = f"{outcome.figure(fastest.pace)} {outcome.unit}"
    return Row("  limit", f"your data loaders need {every}, however fast gradients travel")


def _changes(standing: Standing, configuration: Configuration, outcome: Outcome) -> str:
    """What is changed in training; a rung's own words, and how far gradients are off."""
    changes = f"{standing.configuration.changes} ({standing.rung.value})"
    if standing.error is not None:
        changes += f"; gradients are off by {gradient_error(standing.error.relative, standing.error.of_sum)}"
    start = POWERSGD_START_STEP.of(configuration)
    if not start:
        return changes
    changes += f"; only after {start} reductions"
    steps, of_each = outcome.length, max(1.0, outcome.facts.micro_batches) / configuration.steps_per_update
    if steps is None or steps * of_each > start:
        return changes
    return f"{changes}, but your script has only {steps} steps: --job-steps {steps} lets it begin earlier"


def _why_slow(diagnosis: object) -> Iterator[Row]:
    if not isinstance(diagnosis, Diagnosis):
        return
    proved = [one for one in diagnosis.findings if one.status == "proved"]
    suspected = [one for one in diagnosis.findings if one.status == "suspected"]
    step = milliseconds(diagnosis.seconds)
    for one in proved[:1]:
        yield Row("slow because", f"{in_words(one.cause)}: {milliseconds(one.seconds)} of {step} ms (proved)")
        yield Row("  mend", one.fix, most=_MOST_OF_A_FIX)
    for one in suspected[:1]:
        yield Row("  perhaps", f"{in_words(one.cause)}: up to {milliseconds(one.seconds)} of {step} ms (not proved)")
        if not proved:
            yield Row("  mend", one.fix, most=_MOST_OF_A_FIX)


def _ways(outcome: Outcome, ways: Ways) -> Iterator[Row]:
    further = outcome.decision.further
    best = next((one for one in outcome.ladder if further is not None and one.rung is further), None)
    if best is not None and further is not None:
        gain = f"--allow {further.value} would give ×{ratio(best.speedup.ratio)}"
        yield Row("more", f"{gain}: {best.configuration.changes}")
    if outcome.drifted:
        began, ended = (outcome.figure(seconds) for seconds in (outcome.baseline.seconds, outcome.baseline_seconds))
        yield Row(
            "noise",
            f"your settings took {began} {outcome.unit} at first and {ended} in the end: other programs were at work, "
            "or the script changes its pace",
        )
    yield Row("saved", f"{ways.recipe}, used by the next {ways.next_start}" if ways.next_start else ways.recipe)
    if ways.recipe and outcome.decision.configuration and outcome.objective is None:
        yield Row("in your code", f"autoddp recipe code {shlex.quote(ways.recipe)} prints the lines")
    yield Row("report", ways.report)
    yield Row("undo", ways.undo if outcome.decision.configuration else "")
