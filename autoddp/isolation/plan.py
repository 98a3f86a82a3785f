"""What a process of the script is told about its isolation, in one environment variable."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field

from autoddp.isolation import Level

SHARED_MEMORY = "shared-memory"
"""Under guard: a file beside the socket that lists what the script has made, see `guard.shared_memory`."""


@dataclass(frozen=True)
class IsolationPlan:
    """Every Python process of an attempt reads it at its start, those that the script starts too."""

    level: Level
    socket: str
    """Path of the launcher's Unix socket, which is told why tuning must stop."""
    scratch: str = ""
    """Under guard: the folder that holds what the script has written, shared by all ranks."""
    writable: tuple[str, ...] = ()
    """Under guard: real folders in which writes are real (the run's own folder, the socket's, /dev)."""
    copied_at_most: int = 0
    """Under overlay: the largest file, in bytes, that a write may make the overlay copy; 0: any."""
    landlock: bool = False
    """Under guard: whether the kernel refuses writes anywhere else, also by programs that are not Python."""
    programs_are_watched: bool = False
    """Whether the kernel holds what all programs of the attempt do until the keeper has judged it."""
    began: float = field(default_factory=time.time)
    """When the attempt began, by `time.time()`: a named pipe that is older is not the attempt's."""

    def text(self) -> str:
        """The variable's value."""
        return json.dumps({**asdict(self), "level": self.level.value})

    @classmethod
    def parse(cls, text: str) -> IsolationPlan:
        """The plan back from the variable's value."""
        plain = json.loads(text)
        return cls(**{**plain, "level": Level(plain["level"]), "writable": tuple(plain["writable"])})
