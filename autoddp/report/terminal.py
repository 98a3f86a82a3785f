"""A study on stderr: on a terminal one progress bar, elsewhere a line now and then; then the answer, in few lines.

With --verbose there is a line for each trial, the diagnosis in full and the ladder. Details of the study go to the
run's log only, which has every line. Nothing is written to stdout: the script uses it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autoddp.diagnose import Diagnosis
from autoddp.files import append
from autoddp.knobs import Configuration, Rung
from autoddp.knobs.job import OWN_MODELS, PARTED
from autoddp.log import WIDTH, UnfailingStderr, cursor_is_in_a_drawing, line_is_shown, printable, printable_lines
from autoddp.report.answer import Row
from autoddp.report.diagnosis_text import parts
from autoddp.settings import Objective
from autoddp.study import Observer, Outcome, Screened, Standing, TrialRecord
from autoddp.tables import LITERAL, Fitting, Harmless, text_of
from autoddp.timing import Headroom
from autoddp.units import data_size, duration, gradient_error, milliseconds, percent
from autoddp.wire import JobFacts

_PLAIN_WIDTH = 200  # columns of a log file, where a folded line is harder to read than a long one
_WIDTH = 70  # columns of what may be cut short
_BETWEEN = 15.0  # seconds between two lines that tell in a file how far the trials are


def _console() -> Console:
    # rich answers a broken pipe by ending the program.
    stderr = cast("IO[str]", UnfailingStderr())
    if stderr.isatty() and not _is_in_background(stderr.fileno()):
        console = Console(file=stderr, **LITERAL)
        if not console.width:  # COLUMNS=0: rich would print nothing at all
            console.width = WIDTH
        if not console.is_dumb_terminal:  # on such a one rich draws nothing, so it gets lines, as a file does
            return console
    # Services that run tests set FORCE_COLOR. rich then takes a file for a terminal, and would draw a spinner there.
    return Console(file=stderr, force_terminal=False, width=_PLAIN_WIDTH, **LITERAL)


def _is_in_background(terminal: int) -> bool:
    """Whether the terminal is the shell's meanwhile, as after `&`: its cursor must stay, and so what is typed there."""
    with contextlib.suppress(OSError):  # it is not the terminal of this session
        return os.tcgetpgrp(terminal) != os.getpgrp()
    return False


_drawn_on: Console | None = None
"""The console of the bar or the spinner that is on the terminal now."""


def _is_drawn_on(console: Console | None) -> None:
    global _drawn_on
    _drawn_on = console
    cursor_is_in_a_drawing(console is not None)


def say(text: str, style: str = "") -> None:
    """One line for the user; `style` in rich's words, for a terminal that has colours."""
    # While a bar or a spinner is on the terminal, only its own console can print a line above it.
    line_is_shown()
    (_drawn_on or _console()).print(Text(f"autoddp: {printable(text)}", style=style), soft_wrap=True)


def warn(text: str) -> None:
    """One line in bold red, for what the user must not overlook."""
    say(text, style="bold red")


class Terminal(Observer):
    """Shows a study while it runs.

    `allows`: whether the user allows a configuration to be launched. `log`: a file that gets every line, those that are
    shown and those that are not. `launches`: whether the job is launched with the chosen configuration; only the last
    line depends on it. `verbose`: whether details are shown too. `objective`: what is measured of a script without DDP.
    """

    def __init__(
        self,
        allows: Callable[[Configuration], bool],
        log: Path,
        launches: bool = True,
        verbose: bool = False,
        objective: Objective | None = None,
    ) -> None:
        self._objective = objective
        self._launches = launches
        self._verbose = verbose
        self._console = _console()
        self._allows = allows
        self._log = log
        self._baseline = self._best = float("inf")
        self._reduces = True
        self._finals_began, self._progress_shown = 0.0, time.monotonic()
        self._bar = _Bar(self._console)
        # Only until the job runs: redrawing takes a core from the steps that are timed.
        self._waiting = contextlib.ExitStack()
        if self._console.is_terminal:
            self._waiting.enter_context(_spinner(self._console, "starting the script"))

    def close(self) -> None:
        """Remove the bar and the spinner from the terminal."""
        self._waiting.close()
        self._bar.stop()

    def ready(self, facts: JobFacts) -> None:
        """The job has started: says what is being tuned, and notes which knobs are left as they are."""
        self._waiting.close()
        self._reduces = facts.micro_batches > 0
        ranks = f"{facts.world_size} rank{'s' if facts.world_size > 1 else ''}"
        where = f"{ranks} on {facts.nodes} node{'s' if facts.nodes > 1 else ''}"
        self._line(f"{where}, {facts.backend}, {data_size(facts.gradient_bytes)} of gradients per step")
        if facts.link:
            self._note("what autoddp bench measured of this link gives the first guesses")
        for parted in (PARTED, OWN_MODELS):
            if parted in facts.left_out.values():
                self._line(f"warning: {parted}")
        for why in dict.fromkeys(facts.left_out.values()):
            names = ", ".join(name for name, reason in facts.left_out.items() if reason == why)
            self._note(f"left as it is: {names} ({why})")

    def recording(self) -> None:
        """The script has started, and its calls are timed."""
        self._waiting.close()

    def baseline(self, record: TrialRecord, headroom: Headroom) -> None:
        """The script as written has been measured: says how long a step takes, with and without reduction."""
        self._baseline = record.seconds
        best = self._baseline * (1 - headroom.share)
        if headroom.why_unknown:
            self._line(f"{milliseconds(self._baseline)} ms per step as written; what gradients take of it is not known")
            self._line(f"the script fails in steps without DDP's reduction, or after them: {headroom.why_unknown}")
            self._progress_shown = time.monotonic()
            return
        self.detail(
            f"as written {milliseconds(self._baseline)} ms per step; without any reduction {milliseconds(best)} ms: "
            f"headroom {headroom}"
        )
        if not self._verbose:
            ends = dict.fromkeys((percent(headroom.low), percent(headroom.high)))
            # A script that reduces by itself may well spend its steps on gradients.
            takes = f"gradients take {' to '.join(ends)} of it" if self._reduces else "DDP reduces no gradients in it"
            self._line(f"{milliseconds(self._baseline)} ms per step as written; {takes}")
        self._progress_shown = time.monotonic()

    def started(self, record: TrialRecord, facts: JobFacts, seconds: float) -> None:
        """See `Observer`."""
        self._waiting.close()
        self._baseline = record.seconds
        assert self._objective is not None
        count = len(facts.start_settings)
        tried = f"{count} setting{'s' if count > 1 else ''} to try" if count else "no setting to try"
        figure = f"{self._figure(record.seconds)} {self._objective.unit}"
        self._line(f"as written: {figure}; each trial is a start of the script, {duration(seconds)}; {tried}")
        self._progress_shown = time.monotonic()

    def _figure(self, seconds: float) -> str:
        return milliseconds(seconds) if self._objective is None else self._objective.figure(seconds)

    def progress(self, cause: str, number: int, of: int) -> None:
        """Experiment `number` of a diagnosis begins."""
        self._waiting.close()
        if not self._console.is_terminal:
            self.detail(f"diagnosis {number}/{of}: {cause}")
            if number == 1 and not self._verbose:
                self._line("finding out why a step is slow")
        self._bar.draw("diagnosis", number - 1, of, cause)

    def diagnosed(self, diagnosis: Diagnosis) -> None:
        """The verdict; then a usual step of each rank, and what was found."""
        self._bar.stop()
        for line in diagnosis.verdict:
            self.detail(line)
        self._show(lambda boxed: parts(diagnosis, boxed))

    def not_diagnosed(self, why: str) -> None:
        """Nobody knows why the job is slow; the trials go on."""
        self._bar.stop()
        self._line(f"not diagnosed: the script has failed meanwhile: {why}")

    def trial(self, record: TrialRecord, planned: int, best: TrialRecord | None, seconds_left: float) -> None:
        """A trial has ended. The best trial shown is the best allowed one, so the study's own `best` is not used."""
        head = f"trial {record.number:>{len(str(planned))}}/{planned}"
        if record.state in ("failed", "refused"):
            text = f"{head}  {record.state} ({record.reason})  {record.configuration}"
        else:
            text = f"{head}  {self._measured(record, seconds_left)}"
        if record.state == "failed":  # it costs a start of the script
            self._line(text)
        elif self._console.is_terminal:
            self._note(text)
        else:
            self.detail(text)
        gain = f"best ×{self._baseline / self._best:.2f}, " if self._best < self._baseline else ""
        self._bar.draw("trials", record.number, planned, f"{gain}{duration(seconds_left)} left")
        now = time.monotonic()
        if not self._verbose and not self._console.is_terminal and now - self._progress_shown > _BETWEEN:
            self._progress_shown = now
            self._line(f"trial {record.number} of {planned} at most: {gain}{duration(seconds_left)} left")

    def enough(self, number: int, planned: int) -> None:
        """The trials have ended early."""
        self._line(f"{number} of {planned} trials: no other should gain much; --all-trials runs them all")

    def _measured(self, record: TrialRecord, seconds_left: float) -> str:
        allowed = self._allows(record.configuration)
        if allowed:
            self._best = min(self._best, record.seconds)
        so_far = f"best {self._figure(self._best)}  " if self._best < float("inf") else ""
        rung = (
            f"{record.configuration.rung.value:<5}" if allowed else f"{record.configuration.rung.value} (not allowed)"
        )
        unit = "ms" if self._objective is None else self._objective.unit
        return (
            f"{self._figure(record.seconds):>5} {unit}  ×{self._baseline / record.seconds:.2f}  {so_far}"
            f"{duration(seconds_left)} left  {rung}  {record.configuration}"
            f"{'  cut short' if record.state == 'cut short' else ''}"
        )

    def screened(self, settings: Sequence[Screened], trials: int) -> None:
        """The communication benchmark has measured the settings that need another start of the script."""
        for one in settings:
            gain = "" if one.gain is None else f"×{one.gain:.2f} in the communication benchmark, "
            if one.promising:
                self.detail(f"{Configuration(one.setting)}: {gain}up to {trials} trials with it")
                if not self._verbose:
                    words = "; ".join(Configuration(one.setting).in_words)
                    line = f"to try last, by a new start: {words}"  # after the first final rounds
                    self._line(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 2]} …")
            else:
                why = gain or "no benchmark could check it for lost data, "
                self._note(f"{Configuration(one.setting)}: {why}left as it is")

    def no_time_for_starts(self, needed: float) -> None:
        """See `Observer`."""
        least = f"--budget {math.ceil(needed / 60)}m at least"  # with more time more trials are run before them
        self._line(f"no time is left for new starts of the script: they need {least}")

    def semifinal(self, rung: Rung, contenders: int) -> None:
        """Configurations of a rung that no trial could tell apart are about to be compared."""
        self._note(f"the {contenders} fastest of {rung.value} run against each other, the best goes to the finals")

    def final(self, number: int, planned: int) -> None:
        """A final round has ended."""
        if number == 1:
            if not self._finals_began and not self._console.is_terminal:  # a study may have several finals
                self._line("final rounds: your settings and the best ones take turns")
            self._finals_began = time.monotonic()
        self._note(f"final round {number} of {planned} at most")
        each = (time.monotonic() - self._finals_began) / (number - 1) if number > 1 else 0.0
        most = f"{duration(each * (planned - number))} left at most" if each else ""
        self._bar.draw("final rounds", number, planned, most)

    def finished(self, outcome: Outcome) -> None:
        """The ladder, and what will be launched."""
        self.close()
        if outcome.ladder:
            self._show(lambda boxed: [_ladder(outcome, self._allows, boxed)])
        for record in outcome.trials:
            if record.state == "refused":
                self.detail(f"not on the ladder: {record.configuration.hook}: {record.reason}")
        if outcome.drifted:
            began, ended = map(outcome.figure, (outcome.baseline.seconds, outcome.baseline_seconds))
            self.detail(
                f"your settings took {began} {outcome.unit} at the beginning, then {ended} in the final rounds: other "
                "programs were at work, or the script itself changes its pace"
            )
        known = outcome.profile
        if known is not None and known.typical_error is not None and known.large_error is not None:
            half, nine_of_ten = percent(known.typical_error, ".1f"), percent(known.large_error, ".1f")
            self._note(
                f"predicted before they were measured: half of the trials within {half}, 90 % within {nine_of_ten}"
            )
        # Where too little was measured, or tuning has ended early, what is launched is said when that is settled: the
        # user may have ended it, and of several hosts one may know more.
        if not outcome.ended and not outcome.decision.is_open:
            verb = "launching" if self._launches else "chosen:"
            self.detail(f"{verb} {outcome.decision.configuration}: {outcome.decision.why}")

    def answer(self, rows: Sequence[Row]) -> None:
        """The answer in few lines, between empty ones."""
        self.close()
        line_is_shown()
        text = Text("\n")
        for row in rows:
            for number, line in enumerate(row.lines()):
                is_head = number == 0 and not row.label.startswith(" ")
                text.append(line + "\n", style="bold green" if row.good else "bold" if is_head else "")
        self._console.print(text, soft_wrap=True)
        self._note(printable_lines(text.plain))

    def _show(self, drawn: Callable[[bool], Sequence[RenderableType]]) -> None:
        """Tables; `drawn` makes them, with boxes or without. They are shown with --verbose only."""
        plain = text_of(drawn(False), _PLAIN_WIDTH)
        if self._verbose and self._console.is_terminal:
            for part in drawn(True):
                self._console.print(Harmless(part))
        elif self._verbose:
            self._console.print(Text(plain), soft_wrap=True)
        self._note(plain)

    def detail(self, text: str) -> None:
        """A line that is shown with --verbose only."""
        if self._verbose:
            self._line(text)
        else:
            self._note(printable(text))

    def _line(self, text: str) -> None:
        line = printable(text)
        line_is_shown()
        self._console.print(Text(f"autoddp: {line}"), soft_wrap=True)
        self._note(line)

    def _note(self, text: str) -> None:
        """Lines for the log only, which is read on a terminal too."""
        with contextlib.suppress(OSError):
            append(self._log, f"{printable_lines(text)}\n")


@contextlib.contextmanager
def _spinner(console: Console, text: str) -> Iterator[None]:
    """A spinner before `text`, which a thread redraws."""
    # rich's own `status` puts a file of its own in the place of sys.stderr, which prints on this console. This console
    # prints to sys.stderr, so the first line would be printed without end, and its locks would be held for ever.
    spinner = Spinner("dots", Text(text), style="status.spinner")
    with Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
        _is_drawn_on(console)
        try:
            yield
        finally:
            _is_drawn_on(None)


class _Bar:
    """One progress bar on a terminal, nothing elsewhere.

    It is drawn only by `draw`, which is called between two measurements: a bar that redraws itself would take a core
    from timed steps.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("autoddp: {task.description} {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[more]}"),
            console=console,
            disable=not console.is_terminal,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None

    def draw(self, what: str, done: int, of: int, more: str) -> None:
        """Show that `done` of `of` are done; `more` is printed behind the bar."""
        if self._progress.disable:
            return
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(what, completed=done, total=of, more=more)
            _is_drawn_on(self._console)
        self._progress.update(self._task, description=what, completed=done, total=of, more=more, refresh=True)
        line_is_shown()  # who sees the bar move needs no line that tells what is waited for

    def stop(self) -> None:
        """Remove the bar from the terminal."""
        if self._task is not None:
            self._progress.stop()
            self._task = None
            _is_drawn_on(None)


def _ladder(outcome: Outcome, allows: Callable[[Configuration], bool], boxed: bool) -> RenderableType:
    table = _table_of_rungs(outcome, allows, boxed)
    return Fitting(table, _lines_of_rungs(outcome, allows)) if boxed else table  # a file has columns enough


def _table_of_rungs(outcome: Outcome, allows: Callable[[Configuration], bool], boxed: bool) -> Table:
    look: dict[str, Any] = {"pad_edge": False} if boxed else {"box": None, "padding": (0, 2, 0, 0)}
    table = Table(title="the ladder", title_justify="left", title_style="bold", **look)
    table.add_column("rung")
    table.add_column("what it changes in training", max_width=30)
    table.add_column("configuration", overflow="fold")
    table.add_column(outcome.unit, justify="right", no_wrap=True)
    table.add_column("speed-up (99 %)", no_wrap=True)
    table.add_column("gradient error", justify="right", no_wrap=True)
    baseline = outcome.baseline_seconds
    table.add_row("as written", "nothing", "your settings", outcome.figure(baseline), "×1", "0")
    for standing in outcome.ladder:
        chosen = standing.configuration == outcome.decision.configuration
        gain = Text(str(standing.speedup), style="green" if standing.speedup.sure else "")
        table.add_row(
            Text(_rung(standing, outcome, allows), style="bold" if chosen else ""),
            standing.configuration.changes,
            str(standing.configuration),
            outcome.figure(standing.seconds),
            gain,
            _error(standing),
        )
    return table


def _lines_of_rungs(outcome: Outcome, allows: Callable[[Configuration], bool]) -> RenderableType:
    """The ladder where its table has no room: for each rung a line of figures, and below it what the rung is."""
    baseline = outcome.figure(outcome.baseline_seconds)
    lines: list[RenderableType] = [Text("the ladder", style="bold"), Text(f"as written: {baseline} {outcome.unit}")]
    for standing in outcome.ladder:
        figures = f"{outcome.figure(standing.seconds)} {outcome.unit}, {standing.speedup}"
        error = f", gradient error {_error(standing)}" if standing.error else ""
        lines.append(Text(f"{_rung(standing, outcome, allows)}: {figures}{error}"))
        below = (standing.configuration.changes, str(standing.configuration))
        lines += [Padding(Text(text), (0, 0, 0, 2)) for text in below]
    return Group(*lines)


def _rung(standing: Standing, outcome: Outcome, allows: Callable[[Configuration], bool]) -> str:
    """The rung of it, and whether it is launched or not allowed."""
    chosen = standing.configuration == outcome.decision.configuration
    return standing.rung.value + (" ←" if chosen else "" if allows(standing.configuration) else " (not allowed)")


def _error(standing: Standing) -> str:
    return gradient_error(standing.error.relative, standing.error.of_sum) if standing.error else "0"
