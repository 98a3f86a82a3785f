"""What a study leaves behind: plain data for the recipe, the report and summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoddp.knobs import Configuration, GradientError, Rung, Value
from autoddp.study.semifinals import Semifinal
from autoddp.timing import Block, Speedup, median
from autoddp.wire import JobFacts

WORTHWHILE = 0.03
"""Headroom below which no trial is run: less can hardly be told from noise."""
PROMISING = 1.05
"""Times as fast in the communication benchmark: a step gains less than its reduction does."""
NOISY = 1.2
"""Times by which a step as written may differ between the beginning and the final rounds."""

State = Literal["measured", "cut short", "failed", "refused"]


@dataclass(frozen=True)
class TrialRecord:
    """One configuration measured."""

    number: int
    """0 for the baseline, then 1 to N."""
    configuration: Configuration
    state: State
    blocks: tuple[Block, ...] = ()
    reason: str = ""
    """Why it failed, was cut short or is refused."""
    error: GradientError | None = None
    """Of its hook's gradients; None where it has none, or an earlier trial of the same hook has it."""

    @property
    def usable(self) -> bool:
        """Whether it could be launched: it ran, and its gradients are within the limits."""
        return self.state in ("measured", "cut short")

    @property
    def seconds(self) -> float:
        """Seconds of a typical step over all its blocks; infinite when it failed or is refused."""
        steps = [second for block in self.blocks for second in block.seconds]
        return median(steps) if steps and self.usable else float("inf")


@dataclass(frozen=True)
class Screened:
    """What the communication benchmark says of one setting."""

    setting: Mapping[str, Value]
    gain: float | None
    """Times as fast as the settings at hand; 0.0 where nothing arrives, None where it cannot be judged so."""

    @property
    def promising(self) -> bool:
        """Whether it is worth a start of the script."""
        return self.gain is None or self.gain >= PROMISING


@dataclass(frozen=True)
class Standing:
    """A finalist: what it gave in the final rounds, measured in turn with the baseline."""

    configuration: Configuration
    seconds: float
    speedup: Speedup
    rounds: tuple[Block, ...] = ()
    error: GradientError | None = None
    """Of its hook's gradients; None where it has no hook of ours."""
    speedup_low_over: Mapping[Rung, float] = field(default_factory=dict)
    """On a ladder: milder rung → lower end of the speed-up over the best of that rung, from the same final rounds."""

    @property
    def speedup_low(self) -> float:
        """Lower end of the speed-up over the script as written."""
        return self.speedup.low

    @property
    def speedup_high(self) -> float:
        """Upper end of it."""
        return self.speedup.high

    @property
    def rung(self) -> Rung:
        """The rung it stands on."""
        return self.configuration.rung


@dataclass(frozen=True)
class Decision:
    """What is launched, and why in one sentence. An empty configuration: the script's own settings stay."""

    configuration: Configuration
    why: str
    further: Rung | None = None
    """The rung that would be launched if the user allowed it."""


@dataclass(frozen=True)
class Outcome:
    """A whole study."""

    facts: JobFacts
    baseline: TrialRecord
    headroom: float
    """The share of the baseline's step that ends when DDP's reduction is switched off: 0.0 to 1.0."""
    headroom_block: Block
    """Steps without reduction, each as long as on its slowest rank."""
    trials: tuple[TrialRecord, ...]
    baseline_rounds: tuple[Block, ...]
    """The baseline's blocks in the final rounds; index i stands beside every finalist's round i."""
    finalists: tuple[Standing, ...]
    ladder: tuple[Standing, ...]
    """The best finalist of each rung, exact first; a rung nobody reached is absent."""
    decision: Decision
    screened: tuple[Screened, ...] = ()
    """Settings of another start, with what the communication benchmark said of each."""
    steps: dict[str, int] = field(default_factory=dict)
    """Steps of the running model used, by purpose: "measured", "warm-up"."""
    wall_seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase: "headroom", "baseline", "trials", "finals"; of which "measured", "warm-up"."""

    semifinals: tuple[Semifinal, ...] = ()
    """Run before the finals, where several of a rung could not be told apart by their trials."""
    compilations: int = 0
    """How often torch.compile was at work on rank 0."""
    headroom_interval: tuple[float, float] = (0.0, 1.0)
    """99 % interval of the headroom."""

    @property
    def drifted(self) -> bool:
        """Whether a step as written takes another time in the final rounds than it took at the beginning."""
        ratio = self.baseline_seconds / self.baseline.seconds
        return not 1 / NOISY <= ratio <= NOISY

    @property
    def baseline_seconds(self) -> float:
        """Seconds of a step as written: from the finals where there were any, beside the finalists."""
        rounds = [block.median for block in self.baseline_rounds]
        return median(rounds) if rounds else self.baseline.seconds
