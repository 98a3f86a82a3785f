"""The recipe as data. Each field's comment is what the TOML file says beside the value."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from autoddp.knobs import Configuration, Rung

SCHEMA = 1


@dataclass(frozen=True)
class MadeBy:
    """What wrote the recipe."""

    autoddp: str
    torch: str
    python: str
    date: str
    """ISO 8601, UTC, to the second."""


@dataclass(frozen=True)
class Fits:
    """The job and machine that a recipe was measured on."""

    world_size: int
    nodes: int
    backend: str
    devices: tuple[str, ...]
    torch: str
    """Without the build suffix: 2.13.0, not 2.13.0+cpu."""
    gradient_bytes: int
    parameters_digest: str

    @property
    def digest(self) -> str:
        """16 hex digits over all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class LadderEntry:
    """The best configuration of one rung."""

    rung: Rung
    configuration: Configuration
    ms_per_step: float
    speedup: float
    speedup_low: float
    speedup_high: float

    def plain(self) -> dict[str, Any]:
        """JSON and TOML types only."""
        return {**vars(self), "rung": self.rung.value, "configuration": self.configuration.plain()}


@dataclass(frozen=True)
class Evidence:
    """What was measured, so that a reader can doubt it."""

    baseline_ms_per_step: float
    headroom: float
    trials: int
    final_rounds: int
    steps: int
    why: str
    """The decision in one sentence."""


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
            "made_by": asdict(self.made_by),
            "fits": {**asdict(self.fits), "devices": list(self.fits.devices), "digest": self.fits.digest},
            "configuration": self.configuration.plain(),
            "env": dict(sorted(self.env.items())),
            "evidence": asdict(self.evidence),
            "ladder": [entry.plain() for entry in self.ladder],
        }
