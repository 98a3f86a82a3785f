"""What report.html reads of a run's summary, with its types. All of it may be absent: the page then says so.

content = page_content(json.loads(text))     # ValueError for anything that is no summary of this schema
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from autoddp.codec import Meta, Struct, convert, field
from autoddp.codec import plain as as_plain
from autoddp.timing import Speedup
from autoddp.version import SUMMARY_SCHEMA

_MOST = 1e12  # keeps sums and quotients finite, with `_LEAST`
_LEAST = 1e-12  # what is closer to 0 is 0
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
    state: str = "measured"
    reason: str = ""
    seconds: Amount | None = None
    """None where it failed."""
    predicted: Amount | None = None
    """Seconds of a step, as they were predicted before the trial."""


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
    error: Error | None = None


class Finals(Struct, frozen=True):
    """Seconds of the steps as written, round by round."""

    baseline_rounds: tuple[tuple[Amount, ...], ...] = ()


class Decision(Struct, frozen=True):
    """What is launched."""

    configuration: Values
    why: str


class Network(Struct, frozen=True):
    """See `launch.network.Network`."""

    says: str = ""


class Transports(Struct, frozen=True):
    """See `launch.nccl_logs.transports`."""

    findings: tuple[str, ...] = ()


class RankStages(Struct, frozen=True):
    """Milliseconds of a usual step of one rank, by stage; `waiting_ms` is a part of `exposed_ms`.

    `other_ms` is what the others leave of a step, so rounding may take it below 0.
    """

    rank: Count
    host: str = ""
    data_ms: Number = 0.0
    copy_ms: Number = 0.0
    buffers_ms: Number = 0.0
    forward_ms: Number = 0.0
    backward_ms: Number = 0.0
    exposed_ms: Number = 0.0
    waiting_ms: Number = 0.0
    optimizer_ms: Number = 0.0
    other_ms: Number = 0.0


class Finding(Struct, frozen=True):
    """A cause, with its price in milliseconds per step and the 99 % interval of the price."""

    cause: str
    ranks: tuple[Count, ...] = ()
    ms: Number | None = None
    low: Number | None = None
    high: Number | None = None
    status: str = "suspected"
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

    step_ms: Amount
    samples_per_second: Amount | None = None
    ranks: tuple[RankStages, ...] = ()
    mended: tuple[RankStages, ...] = ()
    """The same as `ranks` with all causes mended; absent where it was not measured."""
    findings: tuple[Finding, ...] = ()
    waterfall: tuple[Mended, ...] = ()
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
    network: Network | None = None
    transports: Transports | None = None
    diagnosis: Diagnosis | None = None
    timelines: tuple[Timeline, ...] = ()
    topology: str = ""
    recipe_text: str = ""
    what_if: tuple[WhatIf, ...] = ()


def page_content(summary: Any) -> PageContent:
    """What the page shows of a summary. ValueError, with one line, for anything else."""
    if not isinstance(summary, Mapping) or not {"trials", "diagnosis"} & summary.keys():
        raise ValueError("not the summary of a run: it has neither trials nor a diagnosis")
    schema = summary.get("schema")
    if schema != SUMMARY_SCHEMA:
        raise ValueError(f"a summary of schema {SUMMARY_SCHEMA} was expected; upgrade autoddp, or make the run again")
    try:
        return convert(_without_nothing(as_plain(summary)), PageContent)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _without_nothing(value: Any) -> Any:
    """Without the fields that are null or not finite: both mean that there is no such number."""
    if isinstance(value, Mapping):
        return {key: _without_nothing(part) for key, part in value.items() if not _is_nothing(part)}
    if isinstance(value, float) and abs(value) < _LEAST:
        return 0.0
    return [_without_nothing(part) for part in value] if isinstance(value, (list, tuple)) else value


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))
