"""A study on the terminal: one line a trial, a progress bar below it where the terminal has one, then the ladder.

Everything goes to stderr: stdout belongs to the script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoddp.knobs import Configuration, Rung
from autoddp.log import UnfailingStderr
from autoddp.study import Outcome, Screened, TrialRecord
from autoddp.units import data_size, duration, gradient_error, milliseconds
from autoddp.wire import JobFacts

_PLAIN_WIDTH = 200  # columns of a log file, where a folded line is harder to read than a long one


def _console() -> Console:
    # rich answers a broken pipe by ending the program.
    stderr = cast("IO[str]", UnfailingStderr())
    console = Console(file=stderr, highlight=False)
    return console if console.is_terminal else Console(file=stderr, highlight=False, width=_PLAIN_WIDTH)


def say(text: str, style: str = "") -> None:
    """One line for the user; `style` in rich's words, for a terminal that has colours."""
    _console().print(Text(f"autoddp: {text}", style=style), soft_wrap=True)


def warn(text: str) -> None:
    """One line that must not be overlooked."""
    say(text, style="bold red")


class Terminal:
    """A study's `Observer`."""

    def __init__(self) -> None:
        self._console = _console()
        self._baseline = float("inf")
        # Only until the job runs: whatever redraws while steps are timed costs them a core.
        self._waiting = self._console.status("starting the script") if self._console.is_terminal else None
        if self._waiting is not None:
            self._waiting.start()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._waiting is not None:
            self._waiting.stop()

    def ready(self, facts: JobFacts) -> None:
        """What is being tuned."""
        self.close()
        where = f"{facts.world_size} ranks on {facts.nodes} node{'s' if facts.nodes > 1 else ''}"
        self._line(f"{where}, {facts.backend}, {data_size(facts.gradient_bytes)} of gradients per step")
        if facts.link:
            self._line("what autoddp bench measured of this link gives the first guesses")
        for why in dict.fromkeys(facts.left_out.values()):
            names = ", ".join(name for name, reason in facts.left_out.items() if reason == why)
            self._line(f"left as it is: {names} ({why})")

    def baseline(self, record: TrialRecord, headroom: float) -> None:
        """What there is to win."""
        self._baseline = record.seconds
        best = self._baseline * (1 - headroom)
        self._line(
            f"as written {milliseconds(self._baseline)} ms per step; without any reduction {milliseconds(best)} ms: "
            f"headroom {headroom:.0%}"
        )

    def trial(self, record: TrialRecord, planned: int, best: TrialRecord | None, seconds_left: float) -> None:
        """A trial has ended."""
        head = f"trial {record.number:>{len(str(planned))}}/{planned}"
        if record.state == "failed":
            self._line(f"{head}  failed ({record.reason})  {record.configuration}")
            return
        if record.state == "refused":
            self._line(f"{head}  refused ({record.reason})  {record.configuration}")
            return
        cut = "  cut short" if record.state == "cut short" else ""
        so_far = f"best {milliseconds(best.seconds)}" if best else ""
        self._line(
            f"{head}  {milliseconds(record.seconds):>5} ms  ×{self._baseline / record.seconds:.2f}  {so_far}  "
            f"{duration(seconds_left)} left  {record.configuration.rung.value:<5}  {record.configuration}{cut}"
        )

    def screened(self, settings: Sequence[Screened], trials: int) -> None:
        """What the communication benchmark says of settings that need another start."""
        for one in settings:
            gain = "" if one.gain is None else f"×{one.gain:.2f} in the communication benchmark, "
            then = f"up to {trials} trials with it" if one.promising else "left as it is"
            self._line(f"{Configuration(one.setting)}: {gain}{then}")

    def heat(self, rung: Rung, contenders: int) -> None:
        """Those of a rung that no trial could tell apart."""
        self._line(f"the {contenders} fastest of {rung.value} run against each other, the best goes to the finals")

    def final(self, number: int, planned: int) -> None:
        """A final round has ended."""
        self._line(f"final round {number}/{planned}: the best of each rung and your settings, in turn")

    def finished(self, outcome: Outcome) -> None:
        """The ladder, and what will be launched."""
        if outcome.ladder:
            self._console.print(_ladder(outcome))
        for record in outcome.trials:
            if record.state == "refused":
                self._line(f"not on the ladder: {record.configuration.hook}: {record.reason}")
        self._line(f"launching {outcome.decision.configuration}: {outcome.decision.why}")

    def _line(self, text: str) -> None:
        self._console.print(Text(f"autoddp: {text}"), soft_wrap=True)


def _ladder(outcome: Outcome) -> Table:
    table = Table(title="the ladder", title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("rung")
    table.add_column("what it changes in training", max_width=30)
    table.add_column("configuration", overflow="fold")
    table.add_column("ms/step", justify="right", no_wrap=True)
    table.add_column("speed-up (99 %)", no_wrap=True)
    table.add_column("gradient error", justify="right", no_wrap=True)
    baseline = outcome.baseline_seconds
    table.add_row("as written", "nothing", "your settings", milliseconds(baseline), "×1", "0")
    for standing in outcome.ladder:
        chosen = standing.configuration == outcome.decision.configuration
        gain = Text(str(standing.speedup), style="green" if standing.speedup.sure else "")
        table.add_row(
            Text(standing.rung.value + (" ←" if chosen else ""), style="bold" if chosen else ""),
            standing.rung.changes,
            str(standing.configuration),
            milliseconds(standing.seconds),
            gain,
            gradient_error(standing.error.relative, standing.error.of_sum) if standing.error else "0",
        )
    return table
