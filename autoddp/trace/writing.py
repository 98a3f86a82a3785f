"""Writes a trace to a file that Perfetto and Chrome open."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoddp.codec import encode
from autoddp.files import write_whole


def write_trace(path: Path, trace: Mapping[str, Any]) -> tuple[str, ...]:
    """Write the trace whole or not at all, for this user alone; lines that say where it is. OSError.

    A second line says what is not to be trusted in it: contradictions, or reductions that were not recorded.
    """
    write_whole(path, encode(trace), private=True)
    told = f"trace: {path} (open it in https://ui.perfetto.dev or chrome://tracing; both read the file locally)"
    about = trace["otherData"]
    is_sound = "order" not in about or (about["reductions"] and not about["contradictions"])
    return (told,) if is_sound else (told, f"trace: {about['order']}")
