"""The recipe as data. Each field has its type and the rule for its values; what it means is said beside it in TOML.

A field with a default, and one that may be None, may be absent from the file, and is left out where it is that.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any

from autoddp.codec import Meta, plain
from autoddp.knobs import Configuration, Rung

SCHEMA = 1
LARGEST_WHOLE = 2**63 - 1
"""TOML's own limit, which Python's parser does not hold."""

Text = Annotated[str, Meta(description="must be one line of text in quotes")]
"""Printable and not blank: what a recipe says is shown on terminals."""
Texts = Annotated[tuple[Text, ...], Meta(min_length=1, description='must be a list of one or more texts, as ["cpu"]')]
OneOrMore = Annotated[int, Meta(ge=1, le=LARGEST_WHOLE, description="must be a whole number, 1 or more")]
Counts = Annotated[
    tuple[OneOrMore, ...], Meta(min_length=2, description="must be a list of whole numbers, 1 or more, as [4, 8]")
]
Count = Annotated[int, Meta(ge=0, le=LARGEST_WHOLE, description="must be a whole number, 0 or more")]
Share = Annotated[float, Meta(ge=0, le=1, description="must be a number from 0 to 1")]
YesOrNo = Annotated[bool, Meta(description="must be true or false")]
_FINITE = sys.float_info.max
Positive = Annotated[float, Meta(gt=0, le=_FINITE, description="must be a finite number above 0")]
NotNegative = Annotated[float, Meta(ge=0, le=_FINITE, description="must be a finite number, 0 or more")]
OneRung = Annotated[Rung, Meta(description="must be one of " + ", ".join(f'"{rung.value}"' for rung in Rung))]


@dataclass(frozen=True)
class MadeBy:
    """What wrote the recipe."""

    autoddp: Text
    torch: Text
    python: Text
    date: Text
    """ISO 8601, UTC, to the second."""
    arguments: Text = ""
    """Digest of the script's arguments, 16 hex digits; "" where a recipe does not say."""


@dataclass(frozen=True)
class Fits:
    """The job and machine that a recipe was measured on. What has a default may be absent: then it is not compared."""

    world_size: OneOrMore
    nodes: OneOrMore
    backend: Text
    devices: Texts
    torch: Text
    """Without the build suffix: 2.13.0, not 2.13.0+cpu."""
    gradient_bytes: Count
    parameters_digest: Text
    ranks_of_nodes: Counts = ()
    """Ranks of each node, ascending, where nodes have different numbers."""
    links: Texts = ()
    """Classes of link between the GPUs of a node; see `topology.Fingerprint`."""
    networks: Texts = ()
    cuda: Text = ""
    nccl: Text = ""
    script: Text = ""
    """The script's path from the recipe's folder, or `-m` and the module's name."""
    inputs: Texts = ()
    """What the models' forward passes were called with, see `recipe.inputs`."""
    find_unused_parameters: YesOrNo = False
    """Whether the script had DDP look for unused parameters. If not, a script that does runs without `static_graph`."""

    @property
    def digest(self) -> str:
        """16 hex digits over all fields that are there."""
        return hashlib.sha256(json.dumps(table(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class LadderEntry:
    """The best configuration of one rung."""

    rung: OneRung
    configuration: Configuration
    ms_per_step: Positive | None
    """None where `value` is what was measured."""
    speedup: Positive
    speedup_low: Positive
    speedup_high: Positive
    gradient_error: NotNegative | None = None
    """Relative error of its gradients against the exact mean of the same step; None where nothing changes them."""
    gradient_error_of_sum: NotNegative | None = None
    """Relative error of the sum of its gradients over some steps: what error feedback has not paid back by then."""
    speedup_low_over: dict[Rung, Positive] = field(default_factory=dict)
    """Milder rung → lower end of the speed-up over the best of that rung, from rounds that both ran.

    A rung is absent where it is not on the ladder.
    """
    value: Positive | None = None
    """The number that the script prints under it, see `Evidence.objective`; None where steps were measured."""


@dataclass(frozen=True)
class Evidence:
    """What was measured, so that a reader can doubt it."""

    baseline_ms_per_step: Positive | None
    """None where `baseline_value` is what was measured."""
    headroom: Share | None
    """None where the script builds no DDP model, so that there is no reduction to leave out."""
    trials: Count
    final_rounds: Count
    steps: Count
    why: Text
    """The decision in one sentence."""
    run: Text = ""
    """Name of the run folder that holds every measurement; "" where a recipe does not say."""
    headroom_low: Share | None = None
    """99 % interval of the headroom, from here to `headroom_high`; None where a recipe does not say."""
    headroom_high: Share | None = None
    objective: Text = ""
    """What was made better in a script without DDP, as --objective says it; "" for the steps of a DDP job."""
    baseline_value: Positive | None = None
    """The number that the script prints as written."""


@dataclass(frozen=True)
class Recipe:
    """A whole recipe."""

    made_by: MadeBy
    fits: Fits
    configuration: Configuration
    """What is launched; empty: the script's own settings."""
    evidence: Evidence
    ladder: tuple[LadderEntry, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    """Variables set for the workers alone, from the allowed list only."""

    def plain(self) -> dict[str, Any]:
        """JSON and TOML types only, in the order a reader meets them."""
        return {
            "schema": SCHEMA,
            "made_by": table(self.made_by),
            "fits": {**table(self.fits), "digest": self.fits.digest},
            "configuration": self.configuration.plain(),
            "env": dict(sorted(self.env.items())),
            "evidence": table(self.evidence),
            "ladder": [table(entry) for entry in self.ladder],
        }


def table(part: MadeBy | Fits | Evidence | LadderEntry) -> dict[str, Any]:
    """JSON and TOML types only, without the fields that have their default."""
    known = {one.name: getattr(part, one.name) for one in fields(part)}
    if "speedup_low_over" in known:
        known["speedup_low_over"] = {rung: low for rung in Rung if (low := known["speedup_low_over"].get(rung))}
    absent = [name for name, default in defaults(type(part)).items() if known[name] == default]
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}
    found: dict[str, Any] = plain({name: value for name, value in listed.items() if name not in absent})
    return found


def defaults(kind: Any) -> dict[str, Any]:
    """Fields that may be absent: name → the value that they then have."""
    made = {one.name: one.default_factory() for one in fields(kind) if one.default_factory is not MISSING}
    may_be_none = {one.name: None for one in fields(kind) if str(one.type).endswith("| None")}
    return may_be_none | {one.name: one.default for one in fields(kind) if one.default is not MISSING} | made
