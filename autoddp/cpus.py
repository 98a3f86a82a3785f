"""Floor 0. The CPUs that this process may use."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """CPUs on which this process may run; where the system cannot tell (macOS), those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
