"""NCCL's own account of a tuning pass: asked for where the user asks for none, and compared with the topology."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from autoddp.errors import NothingReadable

_MOST = 64 * 2**20  # bytes read in all: of a large node's logs the first lines tell the transports
_AS_FOUND, _WITH_SETTINGS = "nccl", "nccl-under-other-settings"


def variables(folder: Path, settings: Collection[str] = ()) -> dict[str, str]:
    """What makes NCCL write to `folder`, an attempt's; nothing where the user has NCCL talk already.

    `settings`: variables with which the attempt is started beside the user's own. They may change the transports, so
    its logs have another name, and `transports` leaves them alone.
    """
    if any(name in os.environ for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")):
        return {}
    name = _WITH_SETTINGS if settings else _AS_FOUND
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / f"{name}.%h.%p.log")}


def transports(run: Path) -> dict[str, Any]:
    """Of a run's attempts: each way's predicted transport beside the used ones, and the findings, for the summary.

    Empty where NCCL wrote nothing.
    """
    text = _text(sorted(run.glob(f"attempt*/{_AS_FOUND}.*.log")))
    if not text:
        return {}
    from autoddp.topology.nccl_log import read_nccl_log
    from autoddp.topology.probe import probe
    from autoddp.topology.transports import findings, used, ways

    try:
        log = read_nccl_log(text)
    except NothingReadable:
        return {}
    node = probe()
    return {
        "ways": [way.plain() for way in ways(node, log)],
        "used": used(log),
        "findings": findings(node, log),
        "nccl": log.plain(),
    }


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
