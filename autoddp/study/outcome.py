"""The results of a study: plain data for the recipe, the report and summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoddp.knobs import Configuration, GradientError, Rung, Value
from autoddp.knobs.env import may_lose_data
from autoddp.predict import Profile
from autoddp.settings import Objective
from autoddp.study.measure import Diagnosis
from autoddp.study.semifinals import Semifinal
from autoddp.timing import Block, Speedup, median
from autoddp.timing.timeline import Timeline
from autoddp.units import milliseconds
from autoddp.wire import JobFacts

WORTHWHILE = 0.03
"""Headroom below which no trial is run: a smaller gain can hardly be told from noise."""
PROMISING = 1.05
"""Speed-up of the reduction from which an env setting is tried; a whole step gains less than its reduction does."""
NOISY = 1.2
"""Factor by which the time of a step as written may differ between the beginning and the final rounds."""

State = Literal["measured", "cut short", "failed", "refused"]


@dataclass(frozen=True)
class TrialRecord:
    """One configuration and what was measured of it."""

    number: int
    """0 for the baseline, then 1 to N."""
    configuration: Configuration
    state: State
    blocks: tuple[Block, ...] = ()
    reason: str = ""
    """Why the trial failed, was cut short or was refused."""
    error: GradientError | None = None
    """The error of the hook's gradients; None without a hook, or where an earlier trial of the same hook has it."""
    predicted: float | None = None
    """Seconds per step that were predicted before the trial was run; None where nothing could be."""

    @property
    def usable(self) -> bool:
        """Whether the configuration could be launched: it ran, and its gradients are within the limits."""
        return self.state in ("measured", "cut short")

    @property
    def seconds(self) -> float:
        """Median seconds of a step over all blocks; infinite if the trial failed or was refused."""
        return self.measured_seconds if self.usable else float("inf")

    @property
    def measured_seconds(self) -> float:
        """Median seconds of a step over all blocks, also of a refused trial; infinite if nothing was measured."""
        steps = [second for block in self.blocks for second in block.seconds]
        return median(steps) if steps else float("inf")


@dataclass(frozen=True)
class Screened:
    """The communication benchmark's result for one env setting."""

    setting: Mapping[str, Value]
    gain: float | None
    """Speed-up over the present settings; 0.0 if nothing arrives under it, None if the benchmark cannot judge it."""

    @property
    def promising(self) -> bool:
        """Whether the setting is worth a start of the script."""
        return not may_lose_data(self.setting) if self.gain is None else self.gain >= PROMISING


@dataclass(frozen=True)
class Standing:
    """A finalist and its results of the final rounds, in which it alternated with the baseline."""

    configuration: Configuration
    seconds: float
    speedup: Speedup
    rounds: tuple[Block, ...] = ()
    error: GradientError | None = None
    """The error of the hook's gradients; None where the configuration has no hook of autoddp's."""
    speedup_low_over: Mapping[Rung, float] = field(default_factory=dict)
    """On a ladder: milder rung → lower end of the speed-up over the best of that rung, from the same final rounds."""
    likely_low: float = 0.0
    """What the speed-up over the script as written likely is at least. Nothing is launched for it."""
    tests: int = 0
    """How many configurations share the error of the intervals, see `timing.bound`; 0: the rounds were fixed before."""
    pace: float = 0.0
    """Seconds in which the script's loaders give the batches of a step; 0.0 where they keep up."""

    @property
    def speedup_low(self) -> float:
        """Lower end of the speed-up over the script as written."""
        return self.speedup.low

    @property
    def speedup_high(self) -> float:
        """Upper end of the speed-up over the script as written."""
        return self.speedup.high

    @property
    def rung(self) -> Rung:
        """The rung of the configuration."""
        return self.configuration.rung


@dataclass(frozen=True)
class Decision:
    """What is launched, and why, in one sentence. With an empty configuration the script's own settings stay."""

    configuration: Configuration
    why: str
    further: Rung | None = None
    """The rung that would be launched if the user allowed it."""
    is_open: bool = False
    """Whether the settings stay because too little was measured, and not because nothing gains."""


@dataclass(frozen=True)
class Outcome:
    """All results of a study."""

    facts: JobFacts
    baseline: TrialRecord
    headroom: float
    """The share of the baseline's step that is saved when DDP's reduction is switched off: 0.0 to 1.0."""
    headroom_block: Block
    """Steps without reduction; the time of each is that of its slowest rank."""
    trials: tuple[TrialRecord, ...]
    baseline_rounds: tuple[Block, ...]
    """The baseline's blocks in the final rounds; index i belongs to round i, as in every finalist's `rounds`."""
    finalists: tuple[Standing, ...]
    ladder: tuple[Standing, ...]
    """The best finalist of each rung, exact first; a rung without a finalist is absent."""
    decision: Decision
    screened: tuple[Screened, ...] = ()
    """Env settings, each with the communication benchmark's result."""
    steps: dict[str, int] = field(default_factory=dict)
    """Steps of the running model used, by purpose: "measured", "warm-up"."""
    wall_seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds by phase ("headroom", "baseline", "trials", "finals"), and by purpose ("measured", "warm-up")."""

    semifinals: tuple[Semifinal, ...] = ()
    """Semifinals of the rungs in which the trials could not tell several configurations apart."""
    compilations: int = 0
    """Number of compilations by torch.compile on rank 0."""
    diagnosis: Diagnosis | None = None
    """Why the job is slow; None where that was not asked for, or not found out."""
    headroom_interval: tuple[float, float] = (0.0, 1.0)
    """99 % interval of the headroom."""
    profile: Profile | None = None
    """What was learned of a step, for predictions; None where nothing can be predicted."""
    why_no_profile: str = ""
    """Why nothing can be predicted, and what would mend that; "" where there is a profile."""
    timelines: tuple[Timeline, ...] = ()
    """Some steps as written, of each rank; empty where none were recorded."""
    objective: Objective | None = None
    """What was measured in place of a DDP job's steps; what is called seconds is then what its number costs."""
    length: int | None = None
    """Steps of the script, where it has ended by itself while it was tuned, see `wire.Start`."""
    ended: str = ""
    """Why tuning was over before the study was; "" if the study came to its end."""

    @property
    def drifted(self) -> bool:
        """Whether a step as written takes another time in the final rounds than at the beginning, see `NOISY`."""
        ratio = self.baseline_seconds / self.baseline.seconds
        return not 1 / NOISY <= ratio <= NOISY

    @property
    def baseline_seconds(self) -> float:
        """Seconds of a step as written: from the finals if there were any, else from the beginning."""
        rounds = [block.median for block in self.baseline_rounds]
        return median(rounds) if rounds else self.baseline.seconds

    def before(self, standing: Standing) -> float:
        """Seconds of a step as written in the rounds of a finalist, with which its speed-up compares it."""
        rounds = [max(block.median, standing.pace) for block in self.baseline_rounds[: len(standing.rounds)]]
        return median(rounds) if rounds else self.baseline_seconds

    def figure(self, seconds: float) -> str:
        """What was measured as a person reads it, without its `unit`."""
        return milliseconds(seconds) if self.objective is None else self.objective.figure(seconds)

    @property
    def unit(self) -> str:
        """What a figure is."""
        return "ms per step" if self.objective is None else self.objective.unit
