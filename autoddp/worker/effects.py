"""All that a configuration changes in this process: one list, for a trial and for the real job.

A trial applies the whole list between two steps, over and over. The real job applies it once: before its first model is
built, and what needs some of the script's steps to be watched first (`Effect.after_watching`) after these. So what is
launched is what was measured. The settings of a process's start are none of these: both sides get them as variables.
"""

from __future__ import annotations

from autoddp.knobs import Configuration
from autoddp.worker.accumulation import Accumulation
from autoddp.worker.binding import Binding
from autoddp.worker.compiling import Compiling
from autoddp.worker.ddp import Patch
from autoddp.worker.effect import Effect
from autoddp.worker.graphs import Graphs
from autoddp.worker.implicit_no_sync import Deferral
from autoddp.worker.threads import Threads


class DdpObjects(Effect):
    """DDP's arguments and its communication hook: of the objects that are there, and of those still to be built."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`. Any other change also gives each object a new reducer, so that all trials begin alike."""
        live = configuration.without_variables
        if live == self._patch.configuration:
            return
        self._patch.configuration = live
        for wrapped in self._patch.alive():
            if wrapped.takes:
                wrapped.rebuild(live, self._patch.start_step, self._patch.around)


def effects_of(
    patch: Patch,
    binding: Binding,
    threads: Threads,
    deferral: Deferral,
    accumulation: Accumulation,
    compiling: Compiling,
    graphs: Graphs,
) -> tuple[Effect, ...]:
    """All of them, in the order in which they are brought in.

    What is compiled is cut where DDP's buckets end, and a graph is captured of what is then there: so both come last.
    """
    return (binding, threads, deferral, accumulation, DdpObjects(patch), compiling, graphs)
