"""The real NCCL logs in tests/data/nccl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autoddp.errors import NothingReadable
from autoddp.topology.nccl_log import NcclLog, read_nccl_log

CAPTURES = Path(__file__).resolve().parents[1] / "data" / "nccl"
IDS = sorted(path.stem for path in CAPTURES.glob("*.log"))
TEXTS = {name: (CAPTURES / f"{name}.log").read_bytes().decode() for name in IDS}


def plain(log: NcclLog) -> dict[str, Any]:
    """Through JSON and back, as a reader of --json sees it."""
    back: dict[str, Any] = json.loads(json.dumps(log.plain()))
    return back


def transports(text: str) -> dict[str, list[str]]:
    """What is read of `text`; nothing if it is refused, in one line that says what was expected."""
    try:
        found = plain(read_nccl_log(text))
    except NothingReadable as refusal:
        said = str(refusal)
    else:
        assert all("\n" not in sentence for sentence in found["missing"])
        connections: dict[str, list[str]] = found["transports"]
        return connections
    assert "expected the log of a run with NCCL_DEBUG=INFO" in said
    assert "\n" not in said
    return {}
