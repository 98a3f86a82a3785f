"""What report.html reads of a run's summary, with its types. All of it may be absent: the page then says so.

content = page_content(json.loads(text))     # ValueError for anything that is no summary of this schema
content.left_out                             # the parts of the summary that are not what they should be
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from autoddp.codec import WHOLE, Meta, Struct, convert, field, sound_parts
from autoddp.codec import plain as as_plain
from autoddp.settings import Objective
from autoddp.timing import Speedup, median
from autoddp.units import figure, milliseconds
from autoddp.version import SUMMARY_SCHEMA

_MOST = 1e12  # keeps sums and quotients finite, with `_LEAST`
_LEAST = 1e-12  # what is closer to 0 is 0
_ANY_OF = frozenset({"trials", "diagnosis", "objective"})  # a summary has one of them at least
Amount = Annotated[float, Meta(ge=0, le=_MOST)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Factor = Annotated[float, Meta(ge=1 / _MOST, le=_MOST)]
Number = Annotated[float, Meta(ge=-_MOST, le=_MOST)]
Values = dict[str, Any]
"""A configuration. A newer autoddp may have other knobs, so it is not a `Configuration`."""


class Job(Struct, frozen=True):
    """See `wire.JobFacts`."""

    world_size: Count
    nodes: Count
    backend: str = ""
    devices: tuple[str, ...] = ()
    torch: str = ""
    gradient_bytes: Count | None = None
    links: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)


class Trial(Struct, frozen=True):
    """See `study.TrialRecord`."""

    number: Count
    rung: str
    configuration: Values
    state: str
    reason: str = ""
    seconds: Amount | None = None
    """None where it failed."""
    predicted: Amount | None = None
    """Seconds of a step, as they were predicted before the trial."""

    @property
    def says(self) -> str:
        """What came of it, with the reason; "" where it was measured as planned."""
        if self.state != "measured":
            return f"{self.state}: {self.reason or 'no reason is known'}"
        return "" if self.seconds is not None else "its time is not in summary.json"


class Headroom(Struct, frozen=True):
    """See `timing.Headroom`."""

    share: Amount
    interval: tuple[Amount, Amount] | None = None


class Gain(Struct, frozen=True):
    """See `timing.Speedup`."""

    ratio: Factor
    low: Factor
    high: Factor

    def __str__(self) -> str:
        return str(Speedup(self.ratio, self.low, self.high))


class Error(Struct, frozen=True):
    """See `knobs.GradientError`."""

    relative: Amount | None = None
    of_sum: Amount | None = None


class Standing(Struct, frozen=True):
    """The best configuration of a rung."""

    rung: str
    configuration: Values
    seconds: Amount
    speedup: Gain
    rounds: tuple[tuple[Amount, ...], ...] = ()
    """Seconds of its steps, round by round."""
    pace: Amount = 0.0
    """Seconds in which the loaders give the batches of a step; 0.0 where they keep up."""
    error: Error | None = None


class Finals(Struct, frozen=True):
    """Seconds of the steps as written, round by round."""

    baseline_rounds: tuple[tuple[Amount, ...], ...] = ()


class Decision(Struct, frozen=True):
    """What is launched."""

    configuration: Values
    why: str
    further: str = ""
    """The rung that another --allow would launch; "" where there is none."""


class Commands(Struct, frozen=True):
    """What to type next; each "" where it takes more than one command."""

    autoddp: str = ""
    """Trains with what was decided."""
    torchrun: str = ""
    """Trains as before."""


class Network(Struct, frozen=True):
    """See `network.own_network.Network`."""

    says: str = ""


class Transports(Struct, frozen=True):
    """See `runs.nccl_logs.transports`."""

    findings: tuple[str, ...] = ()


class RankStages(Struct, frozen=True):
    """Milliseconds of a usual step of one rank, by stage; `waiting_ms` is a part of `exposed_ms`.

    `other_ms` is what the others leave of a step, so rounding may take it below 0.
    """

    rank: Count
    data_ms: Number
    copy_ms: Number
    buffers_ms: Number
    forward_ms: Number
    backward_ms: Number
    exposed_ms: Number
    waiting_ms: Number
    optimizer_ms: Number
    other_ms: Number
    host: str = ""


class Finding(Struct, frozen=True):
    """A cause, with its price in milliseconds per step and the 99 % interval of the price."""

    cause: str
    status: str
    ranks: tuple[Count, ...] = ()
    ms: Number | None = None
    low: Number | None = None
    high: Number | None = None
    text: str = ""
    fix: str = ""

    @property
    def proved(self) -> bool:
        """Whether an experiment has shown the price."""
        return self.status == "proved"


class Mended(Struct, frozen=True):
    """A step after this cause was mended too; the first one is the step as written."""

    cause: str
    step_ms: Amount


class Scaling(Struct, frozen=True):
    """What all ranks give, against one."""

    text: str


class Diagnosis(Struct, frozen=True):
    """What `autoddp diagnose --json` prints."""

    step_ms: Amount | None = None
    """None where nothing could be measured."""
    samples_per_second: Amount | None = None
    ranks: tuple[RankStages, ...] = ()
    mended: tuple[RankStages, ...] = ()
    """Stages of each rank with all causes mended; absent where that was not measured."""
    findings: tuple[Finding, ...] = ()
    waterfall: Annotated[tuple[Mended, ...], WHOLE] = ()
    """Whole or not at all, because each step is compared with the one before it."""
    scaling: Scaling | None = None
    not_measured: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()


class Span(Struct, frozen=True):
    """See `timing.timeline.Span`."""

    name: str
    begin: Number
    end: Number


class Bucket(Struct, frozen=True):
    """See `timing.timeline.Bucket`."""

    index: Count
    bytes: Count
    launched: Number
    ended: Number


class Timeline(Struct, frozen=True):
    """See `timing.timeline.Timeline`; what the page does not show is not read."""

    rank: Count
    began: Number
    error: Amount
    steps: tuple[Number, ...]
    host: str = ""
    spans: tuple[Span, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    no_buckets: str = ""
    """Why no buckets were recorded; "" where they were."""


class Start(Struct, frozen=True):
    """A start of a script without DDP, or of the script as written."""

    configuration: Values
    state: str
    reason: str = ""
    numbers: tuple[Amount, ...] = ()
    """What it has given; nothing where it failed."""

    @property
    def failed(self) -> str:
        """Why it has no number; "" where it has one."""
        return "" if self.numbers else f"{self.state}: {self.reason or 'no reason is known'}"


class Finalist(Struct, frozen=True):
    """What a configuration gave in the final rounds, start by start."""

    configuration: Values
    gain: Gain
    numbers: tuple[Amount, ...] = ()


class StartRounds(Struct, frozen=True):
    """Final rounds, in each of which the script was started as written and with each finalist."""

    as_written: tuple[Amount, ...] = ()
    finalists: tuple[Finalist, ...] = ()


class Aim(Struct, frozen=True):
    """What was made better in a script without DDP, see `settings.Objective`: seconds of a step, or printed numbers."""

    text: str
    as_written: Amount | None = None
    tuned: Amount | None = None
    """None where nothing else is launched."""
    gain: Gain | None = None
    starts: tuple[Start, ...] = ()
    rounds: StartRounds = StartRounds()

    @property
    def objective(self) -> Objective:
        """What the text stands for; it is not parsed, because another version may have written it."""
        return Objective(self.text)

    def shown(self, number: float) -> str:
        """A number as a person reads it, without its unit."""
        return milliseconds(number) if self.objective.of_steps else figure(number)


class WhatIf(Struct, frozen=True):
    """A prediction of this job elsewhere."""

    label: str
    step_ms: Amount
    efficiency: Amount


class PageContent(Struct, frozen=True):
    """A summary, as far as the page shows it."""

    script: str = ""
    run: str = ""
    """Name of the run's folder."""
    recipe: str = ""
    """The recipe's path."""
    job: Job | None = None
    baseline: Trial | None = None
    headroom: Headroom | None = None
    trials: tuple[Trial, ...] = ()
    finals: Finals | None = None
    ladder: tuple[Standing, ...] = ()
    decision: Decision | None = None
    wall_seconds: dict[str, Amount] = field(default_factory=dict)
    commands: Commands = Commands()
    network: Network | None = None
    transports: Transports | None = None
    diagnosis: Diagnosis | None = None
    objective: Aim | None = None
    timelines: tuple[Timeline, ...] = ()
    topology: str = ""
    recipe_text: str = ""
    what_if: tuple[WhatIf, ...] = ()
    left_out: tuple[str, ...] = ()
    """The parts of the summary that are wrong and not shown: where they are, and why. It is never read from a file."""

    @property
    def launched(self) -> Standing | None:
        """The rung that is launched; None if the script's settings stay."""
        chosen = self.decision.configuration if self.decision else {}
        return next((one for one in self.ladder if chosen and one.configuration == chosen), None)

    @property
    def baseline_rounds(self) -> list[float]:
        """Seconds of a step as written in each final round."""
        return [median(steps) for steps in self.finals.baseline_rounds if steps] if self.finals else []

    def is_left_out(self, part: str) -> bool:
        """Whether this part, such as `diagnosis.findings`, or a part of it is left out."""
        return part != "" and any(re.match(rf"{re.escape(part)}\b", told) for told in self.left_out)


def page_content(summary: Any) -> PageContent:
    """What the page shows of a summary, without the parts that are wrong. ValueError, with one line, for anything else.

    A summary needs its schema, and its trials, its diagnosis or its objective.
    """
    if not isinstance(summary, Mapping) or not _ANY_OF & summary.keys():
        raise ValueError("not the summary of a run: it has neither trials nor a diagnosis")
    schema = summary.get("schema")
    if schema != SUMMARY_SCHEMA:
        raise ValueError(f"a summary of schema {SUMMARY_SCHEMA} was expected; upgrade autoddp, or make the run again")
    try:
        given = _without_nothing(as_plain(summary))
        given.pop("left_out", None)
        found, left_out = sound_parts(given, PageContent)
        if not _ANY_OF & found.keys():
            raise ValueError("; ".join(told for told in _told(left_out) if told.startswith(tuple(sorted(_ANY_OF)))))
        return convert({**found, "left_out": _told(left_out)}, PageContent)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _told(left_out: Mapping[tuple[Any, ...], str]) -> list[str]:
    told = []
    for keys, why in left_out.items():
        place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
        told.append(f"{place}: {why.replace(' | null', '')}")  # what is null has been taken away before
    return told


def _without_nothing(value: Any) -> Any:
    """The value without fields that are null or not finite: both mean that there is no such number."""
    if isinstance(value, Mapping):
        return {key: _without_nothing(part) for key, part in value.items() if not _is_nothing(part)}
    if isinstance(value, float) and abs(value) < _LEAST:
        return 0.0
    if isinstance(value, (list, tuple)):
        return [None if _is_nothing(part) else _without_nothing(part) for part in value]
    return value


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))
