"""Floor 4. Messages between the worker and its node's launcher: versioned JSON over a private Unix socket."""

from autoddp.wire.job_facts import JobFacts
from autoddp.wire.messages import (
    NO_LIMIT,
    VERSION,
    BlockDone,
    Finish,
    Goodbye,
    Hello,
    Measure,
    Message,
    Ready,
    StopTuning,
    Welcome,
    block_of,
    decode,
    encode,
)

__all__ = [
    "NO_LIMIT",
    "VERSION",
    "BlockDone",
    "Finish",
    "Goodbye",
    "Hello",
    "JobFacts",
    "Measure",
    "Message",
    "Ready",
    "StopTuning",
    "Welcome",
    "block_of",
    "decode",
    "encode",
]
