"""Floor 4. All that launcher and worker say to each other: what a worker is for, and the messages of the tuning job."""

from autoddp.wire.experiment import AS_IT_IS, ON_DEVICE, PINNED, PREFETCHED, Delay, Experiment
from autoddp.wire.heartbeat import Heartbeat
from autoddp.wire.job_facts import JobFacts
from autoddp.wire.messages import (
    LARGEST,
    VERSION,
    BlockDone,
    Entry,
    Finish,
    Goodbye,
    Hello,
    LauncherClient,
    Measure,
    Message,
    Ready,
    Start,
    StopTuning,
    Welcome,
    decode,
    encode,
)
from autoddp.wire.worker_config import TUNE, WatchPlan, WorkerConfig, naming_errors

__all__ = [
    "AS_IT_IS",
    "LARGEST",
    "ON_DEVICE",
    "PINNED",
    "PREFETCHED",
    "TUNE",
    "VERSION",
    "BlockDone",
    "Delay",
    "Entry",
    "Experiment",
    "Finish",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "JobFacts",
    "LauncherClient",
    "Measure",
    "Message",
    "Ready",
    "Start",
    "StopTuning",
    "WatchPlan",
    "Welcome",
    "WorkerConfig",
    "decode",
    "encode",
    "naming_errors",
]
