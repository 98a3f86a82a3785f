"""The real captures of RDMA and NVLink tools in tests/data/rdma, and who reads which."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from autoddp.errors import NothingReadable
from autoddp.topology.nvidia.smi_texts import read_gpu_list, read_nvlink_status, read_p2p_status
from autoddp.topology.rdma.texts import read_ibstat, read_ibstatus, read_ibv_devinfo, read_show_gids

CAPTURES = Path(__file__).resolve().parents[1] / "data" / "rdma"


class Result(Protocol):
    def plain(self) -> dict[str, Any]: ...


READERS: dict[str, Callable[[str], Result]] = {
    "ibstat": read_ibstat,
    "ibstatus": read_ibstatus,
    "ibv_devinfo": read_ibv_devinfo,
    "nvidia-smi -L": read_gpu_list,
    "nvidia-smi nvlink -s": read_nvlink_status,
    "nvidia-smi topo -p2p r": read_p2p_status,
    "nvidia-smi topo -p2p rw": read_p2p_status,
    "show_gids": read_show_gids,
}
IDS = sorted(path.stem for path in CAPTURES.glob("*.txt"))


def capture(name: str) -> tuple[str, dict[str, Any]]:
    text = (CAPTURES / f"{name}.txt").read_bytes().decode()
    return text, json.loads((CAPTURES / f"{name}.json").read_text(encoding="utf-8"))


def reading(name: str) -> dict[str, Any]:
    text, about = capture(name)
    return plain(READERS[about["kind"]](text))


def plain(result: Result) -> dict[str, Any]:
    """Through JSON and back, as a reader of --json sees it."""
    back: dict[str, Any] = json.loads(json.dumps(result.plain()))
    return back


def read_or_none(name: str, text: str) -> dict[str, Any] | None:
    """`text` as the capture's reader has it; None if it refuses, which it does in one line that says what it wants."""
    return try_to_read(READERS[capture(name)[1]["kind"]], text)


def try_to_read(read: Callable[[str], Result], text: str) -> dict[str, Any] | None:
    try:
        return plain(read(text))
    except NothingReadable as refusal:
        said = str(refusal)
    assert "expected" in said
    assert "\n" not in said
    return None
