"""This rank's share of the node's processors: how many threads, and on which CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from autoddp.knobs import Configuration
from autoddp.worker.binding import Binding
from autoddp.worker.threads import Threads


@dataclass(frozen=True)
class Processors:
    """Both are turned live."""

    threads: Threads
    binding: Binding

    def turn(self, configuration: Configuration) -> None:
        """As the configuration has it, or as the script wrote it."""
        count = configuration.get("threads")
        self.binding.turn("numa_binding" in configuration)
        self.threads.turn(count if isinstance(count, int) else None)
