"""The recipe as data. Each field's comment is what the TOML file says beside the value."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from autoddp.knobs import Configuration, Rung

SCHEMA = 1
OPTIONAL = ("links", "networks", "cuda", "nccl", "script", "inputs")
"""Parts of [fits] that a recipe may lack."""


@dataclass(frozen=True)
class MadeBy:
    """What wrote the recipe."""

    autoddp: str
    torch: str
    python: str
    date: str
    """ISO 8601, UTC, to the second."""
    arguments: str = ""
    """Digest of the script's arguments, 16 hex digits; "" in recipes of older versions."""

    def plain(self) -> dict[str, str]:
        """JSON and TOML types only; what is absent is left out."""
        return {name: value for name, value in asdict(self).items() if value}


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
    links: tuple[str, ...] = ()
    """Between the GPUs of a node; see `topology.Fingerprint`. This and the parts below it may be absent."""
    networks: tuple[str, ...] = ()
    cuda: str = ""
    nccl: str = ""
    script: str = ""
    """The script's path from the recipe's folder, or `-m` and the module's name; absent in older recipes."""
    inputs: tuple[str, ...] = ()
    """What the models' forward passes were called with, see `recipe.inputs`; absent in older recipes."""

    @property
    def digest(self) -> str:
        """16 hex digits over all fields that are there."""
        return hashlib.sha256(json.dumps(self._present(), sort_keys=True).encode()).hexdigest()[:16]

    def plain(self) -> dict[str, Any]:
        """JSON and TOML types only; what is absent is left out."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in self._present().items()}

    def _present(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in OPTIONAL or value}


@dataclass(frozen=True)
class LadderEntry:
    """The best configuration of one rung."""

    rung: Rung
    configuration: Configuration
    ms_per_step: float
    speedup: float
    speedup_low: float
    speedup_high: float
    gradient_error: float | None = None
    """Relative error of its gradients against the exact mean of the same step; None where nothing becomes of them."""
    gradient_error_of_sum: float | None = None
    """The same of the sum over some steps: what error feedback has not paid back by then."""
    speedup_low_over: dict[Rung, float] = field(default_factory=dict)
    """Milder rung → lower end of the speed-up over the best of that rung, from rounds that both ran.

    A rung is absent where it is not on the ladder, and all are in recipes of older versions.
    """

    def plain(self) -> dict[str, Any]:
        """JSON and TOML types only; what is not known is left out."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        del known["speedup_low_over"]
        over = {rung.value: low for rung, low in sorted(self.speedup_low_over.items(), key=lambda one: one[0].order)}
        plain = {**known, "rung": self.rung.value, "configuration": self.configuration.plain()}
        return plain | ({"speedup_low_over": over} if over else {})


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
    run: str = ""
    """Name of the run folder that holds every measurement; "" where a recipe does not say."""
    headroom_low: float | None = None
    """99 % interval of the headroom, from here to `headroom_high`; None in recipes of older versions."""
    headroom_high: float | None = None

    def plain(self) -> dict[str, Any]:
        """JSON and TOML types only; what is absent is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None and value != ""}


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
            "made_by": self.made_by.plain(),
            "fits": {**self.fits.plain(), "digest": self.fits.digest},
            "configuration": self.configuration.plain(),
            "env": dict(sorted(self.env.items())),
            "evidence": self.evidence.plain(),
            "ladder": [entry.plain() for entry in self.ladder],
        }
