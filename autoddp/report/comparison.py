"""Two runs of a job side by side: its steps, the causes that cost time, and what differs in job and machine.

    found = compare(page_content(before), page_content(after))
    print("\\n".join(found.lines()))

The runs were made at different times, so what other programs did meanwhile is a part of each difference.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autoddp.diagnose.causes import in_words
from autoddp.report.page_content import Job, PageContent, Values
from autoddp.tables import aligned
from autoddp.timing import Speedup, median, unpaired_speedup
from autoddp.units import data_size, milliseconds, ratio

_FACTS = ("world_size", "nodes", "backend", "devices", "torch", "gradient_bytes", "links", "networks")


@dataclass(frozen=True)
class Step:
    """A step in both runs, in seconds; None where a run has not measured it."""

    what: str
    """"as written", "as launched", or the name of a cause."""
    before: float | None
    after: float | None
    times: Speedup | None = None
    """How many times faster it is in the second run; None where rounds are missing."""
    is_cause: bool = False
    """Whether it is the price of a cause, and not a whole step."""

    def row(self) -> tuple[str, str, str, str]:
        """A row for a table, in milliseconds."""
        what = f"  {in_words(self.what)}" if self.is_cause else self.what
        return what, _ms(self.before), _ms(self.after), self._against()

    def _against(self) -> str:
        if self.times is None:
            return ""
        low, high = self.times.low, self.times.high
        if low <= 1 <= high:
            return f"no sure difference (×{ratio(low)} to ×{ratio(high)})"
        if self.times.ratio > 1:
            return f"×{ratio(self.times.ratio)} faster ({ratio(low)} to {ratio(high)})"
        return f"×{ratio(1 / self.times.ratio)} slower ({ratio(1 / high)} to {ratio(1 / low)})"


@dataclass(frozen=True)
class Comparison:
    """What `compare` has found."""

    runs: tuple[str, str]
    steps: tuple[Step, ...]
    """The step as written, the step as launched, and the price of each cause."""
    differs: tuple[str, ...]
    """A line for each fact of job, machine and recipe that is not the same."""

    def lines(self) -> Iterator[str]:
        """For people."""
        yield from (f"{name}  {run}" for name, run in zip("AB", self.runs, strict=True))
        yield ""
        yield aligned([("ms per step", "A", "B", "B against A"), *(step.row() for step in self.steps)])
        yield ""
        yield from (self.differs or ("job, machine and recipe are the same, as far as the runs tell",))

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"runs": self.runs, "steps": [asdict(step) for step in self.steps], "differs": self.differs}


def compare(before: PageContent, after: PageContent) -> Comparison:
    """Compare the second run with the first one. ValueError where neither has measured a step."""
    steps = [step for step in _steps(before, after) if step.before is not None or step.after is not None]
    if not steps:
        raise ValueError("neither of the two runs has measured a step")
    runs = [" ".join(filter(None, (one.script, f"(run {one.run})" if one.run else ""))) for one in (before, after)]
    return Comparison((runs[0], runs[1]), tuple(steps), tuple(_differences(before, after)))


def _steps(before: PageContent, after: PageContent) -> Iterator[Step]:
    yield _step("as written", _as_written(before), _as_written(after))
    yield _step("as launched", _as_launched(before), _as_launched(after))
    prices = [_prices(one) for one in (before, after)]
    for cause in dict.fromkeys([*prices[0], *prices[1]]):
        yield Step(cause, prices[0].get(cause), prices[1].get(cause), is_cause=True)


def _step(what: str, before: list[float], after: list[float]) -> Step:
    sides = [median(rounds) if rounds else None for rounds in (before, after)]
    known = len(before) > 1 and len(after) > 1
    return Step(what, sides[0], sides[1], unpaired_speedup(before, after) if known else None)


def _as_written(content: PageContent) -> list[float]:
    """Seconds of a step, one value for each final round; a single one where there were none."""
    if content.baseline_rounds:
        return content.baseline_rounds
    if (aim := content.objective) is not None and aim.objective.of_steps:
        return list(aim.rounds.as_written) or ([] if aim.as_written is None else [aim.as_written])
    if content.baseline and content.baseline.seconds is not None:
        return [content.baseline.seconds]
    step = content.diagnosis.step_ms if content.diagnosis else None
    return [] if step is None else [step / 1e3]


def _as_launched(content: PageContent) -> list[float]:
    launched = content.launched
    if (aim := content.objective) is not None and aim.objective.of_steps and aim.tuned is not None and content.decision:
        chosen = content.decision.configuration
        rounds = next((list(one.numbers) for one in aim.rounds.finalists if one.configuration == chosen), [])
        return rounds or [aim.tuned]
    if launched is None:
        return _as_written(content) if content.decision else []
    rounds = [max(median(steps), launched.pace) for steps in launched.rounds if steps]  # as `launched.seconds`
    return rounds or [launched.seconds]


def _prices(content: PageContent) -> dict[str, float]:
    """Cause → seconds, of those that an experiment has proved."""
    found = content.diagnosis.findings if content.diagnosis else ()
    return {one.cause: one.ms / 1e3 for one in found if one.proved and one.ms is not None}


def _differences(before: PageContent, after: PageContent) -> Iterator[str]:
    if before.script != after.script:
        yield f"script: {before.script} → {after.script}"
    if before.job and after.job:
        yield from _job_differences(before.job, after.job)
    settings = [one.decision.configuration if one.decision else {} for one in (before, after)]
    if settings[0] != settings[1]:
        yield f"launched: {_text(settings[0])} → {_text(settings[1])}"
    says = [one.network.says if one.network else "" for one in (before, after)]
    if says[0] != says[1]:
        yield f"network: {says[0] or 'not told'} → {says[1] or 'not told'}"
    if before.topology and after.topology:
        for line in difflib.unified_diff(before.topology.splitlines(), after.topology.splitlines(), n=0, lineterm=""):
            if line[:1] in "-+" and line[:3] not in ("---", "+++"):
                yield f"machine {'A' if line[0] == '-' else 'B'}: {line[1:].strip()}"


def _job_differences(before: Job, after: Job) -> Iterator[str]:
    for name in _FACTS:
        one, other = getattr(before, name), getattr(after, name)
        if one != other:
            yield f"{name.replace('_', ' ')}: {_fact(one)} → {_fact(other)}"


def _fact(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return data_size(value) if isinstance(value, int) and value > 1 << 16 else str(value)


def _text(values: Values | Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items()) or "as written"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else milliseconds(seconds)
