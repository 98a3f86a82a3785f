"""Writes a trace to a file that Perfetto and Chrome open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoddp.codec import encode
from autoddp.files import write_whole
from autoddp.timing.timeline import Timeline
from autoddp.trace.events import trace_of
from autoddp.trace.order import order_of


def write_trace(path: Path, timelines: Sequence[Timeline]) -> tuple[str, ...]:
    """Write the trace whole or not at all, for this user alone; lines that say where it is. OSError.

    A second line says what is not to be trusted in it: contradictions, or reductions that were not recorded.
    """
    write_whole(path, encode(trace_of(timelines)), private=True)
    order = order_of(timelines)
    told = f"trace: {path} (open it in https://ui.perfetto.dev or chrome://tracing; both read the file locally)"
    return (told,) if order.reductions and not order.contradictions else (told, f"trace: {order}")
