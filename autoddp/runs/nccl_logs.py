"""NCCL's own log of a tuning attempt: switched on unless the user has done so, and compared with the topology."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from autoddp.errors import NothingReadable
from autoddp.topology import Node

_MOST = 64 * 2**20  # bytes that are read of all logs: a large node's logs name the transports in the first lines
_AS_FOUND, _WITH_SETTINGS = "nccl", "nccl-under-other-settings"


def variables(folder: Path, settings: Collection[str] = ()) -> dict[str, str]:
    """Variables by which NCCL writes its log to `folder`, an attempt's; none where the user has set one of them.

    `settings`: variables of the study's with which the attempt is started. They may change the transports, so the logs
    get another name, and `transports` does not read them.
    """
    if any(name in os.environ for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")):
        return {}
    name = _WITH_SETTINGS if settings else _AS_FOUND
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / f"{name}.%h.%p.log")}


def transports(run: Path, node: Node) -> dict[str, Any]:
    """For a run's summary: the predicted transport of each way, those that NCCL used, and the findings.

    `node`: this host. Empty where NCCL wrote nothing.
    """
    text = _text(sorted(run.glob(f"attempt*/{_AS_FOUND}.*.log")))
    if not text:
        return {}
    from autoddp.topology.nccl.transports import findings, used, ways
    from autoddp.topology.nccl_log import read_nccl_log

    try:
        log = read_nccl_log(text)
    except NothingReadable:
        return {}
    return {
        "ways": [way.plain() for way in ways(node, log)],
        "used": used(log),
        "findings": findings(node, log),
        "nccl": log.plain(),
    }


def _text(files: list[Path]) -> str:
    parts, left = [], _MOST
    for file in files:
        with contextlib.suppress(OSError), file.open("rb") as stream:
            read = stream.read(left)
            left -= len(read)
            parts.append(read.decode(errors="replace"))
    return "\n".join(parts)
