"""What `autoddp bench` found, as data that goes to JSON and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autoddp.bench.conventions import algbw, busbw
from autoddp.bench.model import LinkModel

SCHEMA = 2


@dataclass(frozen=True)
class Point:
    """One size: the median over blocks of back-to-back repetitions, with its 99 % interval."""

    bytes: int
    """Per rank."""
    seconds: float
    low: float
    high: float
    repetitions: int
    """How many were timed, warm-up not counted."""


@dataclass(frozen=True)
class Sweep:
    """One layout of the world."""

    layout: str
    """`within` a node, `between` nodes (one rank each) or `all`."""
    ranks: int
    """Of the largest group."""
    points: tuple[Point, ...]
    stopped: str = ""
    """Why sizes are missing; "" if none are."""
    model: LinkModel | None = None
    """None for a single size."""

    def plain(self) -> dict[str, Any]:
        """JSON types; bandwidths in GB/s are added for the reader."""
        points = [
            asdict(p) | {"algbw": algbw(p.bytes, p.seconds), "busbw": busbw(p.bytes, p.seconds, self.ranks)}
            for p in self.points
        ]
        return vars(self) | {"points": points, "model": self.model.plain() if self.model else None}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Sweep:
        """Back from `plain`."""
        points = ({k: v for k, v in point.items() if k not in ("algbw", "busbw")} for point in plain["points"])
        model = LinkModel.from_plain(plain["model"]) if plain["model"] else None
        return cls(**{**plain, "points": tuple(Point(**point) for point in points), "model": model})


@dataclass(frozen=True)
class HookCost:
    """Computing of a communication hook on one square float32 matrix, without any communication."""

    hook: str
    """`fp16`, `bf16` or `powersgd`, as the knob names it."""
    rank: int
    """PowerSGD's; 0 for the others."""
    point: Point


@dataclass(frozen=True)
class LinkFacts:
    """What a measurement belongs to: where these are equal, it may be used again."""

    world_size: int
    nodes: int
    backend: str
    """`gloo` or `nccl`."""
    devices: tuple[str, ...]
    """Distinct names, sorted; `cpu` for gloo."""
    torch: str
    """Version without the build."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of rank 0's environment, those that steer the backend; see `backend_variables`."""

    @property
    def key(self) -> str:
        """Sixteen hex digits."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def backend_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that choose interfaces, protocols and algorithms.

    Left out: what only logs, and TORCH_NCCL_*, of which torch elastic sets some in the workers only.

    >>> backend_variables({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "HOME": "/root"})
    {'GLOO_SOCKET_IFNAME': 'eth0'}
    """
    steering = (name for name in sorted(environment) if name.startswith(("GLOO_", "NCCL_")))
    return {name: environment[name] for name in steering if not name.startswith("NCCL_DEBUG")}


@dataclass(frozen=True)
class BenchResult:
    """All of one run."""

    facts: LinkFacts
    sweeps: tuple[Sweep, ...]
    hooks: tuple[HookCost, ...]
    made_by: dict[str, str]
    """Version of autoddp, date in UTC."""
    round_trip: float | None = None
    """Seconds of a small TCP message there and back between two nodes; None on one node, or where none could pass."""

    def plain(self) -> dict[str, Any]:
        """JSON types, for `from_plain`."""
        return {
            "schema": SCHEMA,
            "made_by": self.made_by,
            "facts": asdict(self.facts) | {"devices": list(self.facts.devices)},
            "sweeps": [sweep.plain() for sweep in self.sweeps],
            "hooks": [asdict(cost) for cost in self.hooks],
            "round_trip": self.round_trip,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> BenchResult:
        """Back from `plain`. ValueError, KeyError or TypeError for what never was one, or was of another schema."""
        if plain["schema"] != SCHEMA:
            raise ValueError(f"schema {plain['schema']}, this is {SCHEMA}")
        return cls(
            facts=LinkFacts(**{**plain["facts"], "devices": tuple(plain["facts"]["devices"])}),
            sweeps=tuple(Sweep.from_plain(sweep) for sweep in plain["sweeps"]),
            hooks=tuple(HookCost(**{**cost, "point": Point(**cost["point"])}) for cost in plain["hooks"]),
            made_by=dict(plain["made_by"]),
            round_trip=plain["round_trip"],
        )
