"""NCCL's own account of a tuning pass: asked for where the user asks for none, and compared with the topology."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from autoddp.errors import NothingReadable

_MOST = 64 * 2**20  # bytes read in all: of a large node's logs the first lines tell the transports


def variables(folder: Path) -> dict[str, str]:
    """What makes NCCL write to `folder`; nothing where the user has NCCL talk already."""
    if any(name in os.environ for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")):
        return {}
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log")}


def transports(folder: Path) -> dict[str, Any]:
    """Predicted and used transports and the findings, for the summary; empty where NCCL wrote nothing."""
    text = _text(sorted(folder.glob("nccl.*.log")))
    if not text:
        return {}
    from autoddp.topology.nccl_log import read_nccl_log
    from autoddp.topology.probe import probe
    from autoddp.topology.transports import findings, predicted, used

    try:
        log = read_nccl_log(text)
    except NothingReadable:
        return {}
    node = probe()
    return {"predicted": predicted(node), "used": used(log), "findings": findings(node, log), "nccl": log.plain()}


def _text(files: list[Path]) -> str:
    parts, left = [], _MOST
    for file in files:
        try:
            with file.open("rb") as stream:
                parts.append(stream.read(left).decode(errors="replace"))
        except OSError:
            continue
        left -= len(parts[-1])
        if left <= 0:
            break
    return "\n".join(parts)
