"""Reads the MIG modes of a CSV query of nvidia-smi."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoddp.topology.gpu_list import gpu_uuid
from autoddp.topology.text import closed, lines, not_read, nothing_readable, number

_MOST_GPUS = 999  # a larger index is damage
_MODES = {"Enabled": True, "Disabled": False, "[N/A]": None, "N/A": None, "[Not Supported]": None}


@dataclass(frozen=True)
class MigMode:
    """Whether a GPU is cut into MIG devices; None where the GPU does not know the mode."""

    index: int
    uuid: str
    current: bool | None
    pending: bool | None = None
    """After the next reset of the GPU."""


@dataclass(frozen=True)
class MigModes:
    """The GPUs of the query, in its order."""

    modes: tuple[MigMode, ...]
    missing: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON; `mig_enabled` are indices."""
        return {
            "gpus": len(self.modes),
            "mig_enabled": [mode.index for mode in self.modes if mode.current],
            "modes": [dict(vars(mode)) for mode in self.modes],
            "missing": list(self.missing),
        }


def read_mig_modes(text: str) -> MigModes:
    """MIG modes from `nvidia-smi --query-gpu=uuid,mig.mode.current,mig.mode.pending --format=csv`, heading included.

    A GPU's index is its place in the list, unless `index` is among the columns. NothingReadable for another text.
    """
    rows = [(i, [cell.strip() for cell in line.split(",")]) for i, line in enumerate(lines(text), start=1) if line]
    start = next((place for place, (_, cells) in enumerate(rows) if "mig.mode.current" in cells), None)
    if start is None:
        raise nothing_readable("the CSV of nvidia-smi --query-gpu=uuid,mig.mode.current --format=csv, with its heading")
    columns, modes, unread = rows[start][1], [], []
    for place, (i, cells) in enumerate(rows[start + 1 :]):
        mode = _mode(dict(zip(columns, cells, strict=False)), place) if len(cells) == len(columns) else None
        modes.append(mode)
        if mode is None:
            unread.append(i)
    missing = not_read(unread) if modes else ("no GPU is listed",)
    return MigModes(tuple(mode for mode in modes if mode is not None), missing)


def _mode(row: dict[str, str], place: int) -> MigMode | None:
    index = number(row["index"], _MOST_GPUS) if "index" in row else place
    current, pending = (closed(row.get(f"mig.mode.{when}", "N/A")) for when in ("current", "pending"))
    uuid = gpu_uuid(row.get("uuid", ""))
    if index is None or not {current, pending} <= _MODES.keys() or ("uuid" in row and not uuid):
        return None
    return MigMode(index, uuid, _MODES[current], _MODES[pending])
