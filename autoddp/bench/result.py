"""What `autoddp bench` found, as data that goes to JSON and back.

It is kept in the output folder as `.autoddp/bench/<key>.json`, one file for each kind of world.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autoddp.bench.conventions import algbw, busbw
from autoddp.bench.model import LinkModel
from autoddp.codec import convert, decode, encode, plain
from autoddp.files import write_whole
from autoddp.topology.nccl.interface_names import GLOO, LOOPBACK

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
    """Ranks of the largest group."""
    points: tuple[Point, ...]
    stopped: str = ""
    """Why sizes are missing; "" if none are."""
    model: LinkModel | None = None
    """What was fitted to the points; None where there is a single size."""


@dataclass(frozen=True)
class HookCost:
    """Time that a communication hook computes on one square float32 matrix, without any communication."""

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
    """Variables of rank 0's environment that steer the backend; see `backend_variables`."""

    @property
    def key(self) -> str:
        """Sixteen hex digits."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def backend_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that choose interfaces, protocols and algorithms.

    Left out: what only logs; TORCH_NCCL_*, of which torch elastic sets some in the workers only; and the loopback
    interface, which our own jobs on one host are given.

    >>> backend_variables({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "HOME": "/root"})
    {'GLOO_SOCKET_IFNAME': 'eth0'}
    """
    steering = (name for name in sorted(environment) if name.startswith(("GLOO_", "NCCL_")))
    chosen = {name: environment[name] for name in steering if not name.startswith("NCCL_DEBUG")}
    return {name: value for name, value in chosen.items() if (name, value) != (GLOO, LOOPBACK)}


@dataclass(frozen=True)
class BenchResult:
    """All of one run."""

    facts: LinkFacts
    sweeps: tuple[Sweep, ...]
    hooks: tuple[HookCost, ...]
    made_by: dict[str, str]
    """Version of autoddp, date in UTC."""
    round_trip: float | None = None
    """Seconds that a small TCP message takes to another node and back; None on one node, or where none could pass."""

    def plain(self) -> dict[str, Any]:
        """JSON types, for `from_plain`; bandwidths in GB/s are added for the reader."""
        found: dict[str, Any] = plain(self)
        for sweep in found["sweeps"]:
            for point in sweep["points"]:
                size, seconds = point["bytes"], point["seconds"]
                point |= {"algbw": algbw(size, seconds), "busbw": busbw(size, seconds, sweep["ranks"])}
        return {"schema": SCHEMA, **found}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> BenchResult:
        """The inverse of `plain`. ValueError for anything else, also of another schema."""
        if plain.get("schema") != SCHEMA:
            raise ValueError(f"not a result of schema {SCHEMA}")
        return convert(plain, cls)


def folder(output: Path) -> Path:
    """The folder of measurements within an output folder."""
    return output / "bench"


def store(output: Path, result: BenchResult) -> Path:
    """Write a result, whole or not at all, and return its path. An older one of the same world is replaced. OSError.

    git does not see it, as it does not see the folders of runs: the output folder usually lies in the user's project.
    """
    place = folder(output) / f"{result.facts.key}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # the user's stays
        write_whole(place.parent / ".gitignore", "*\n", private=True, new=True)
    write_whole(place, encode(result.plain(), indent=1), private=True)
    return place


def load_cached(output: Path, facts: LinkFacts) -> BenchResult | None:
    """What was measured in a world like this one, or None; also None for a file that cannot be understood."""
    try:
        text = (folder(output) / f"{facts.key}.json").read_text(encoding="utf-8")
        result = BenchResult.from_plain(decode(text, dict))
    except (OSError, ValueError):
        return None
    return result if result.facts == facts else None
