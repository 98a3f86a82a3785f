"""Reads `nvidia-smi topo -p2p`: which GPUs may reach into each other's memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from autoddp.topology.text import closed, lines, nothing_readable

CODES = {
    "OK": "peer access works",
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "it is not supported",
    "DR": "it is switched off in the driver's registry",
    "U": "the driver does not know",
}
"""What nvidia-smi writes between two GPUs, and what that means. OK is the driver's word, not a measurement."""

_GPU = re.compile(r"GPU([0-9]{1,3})")


@dataclass(frozen=True)
class P2pStatus:
    """The matrix."""

    gpus: tuple[int, ...]
    status: dict[tuple[int, int], str]
    """(from, to) → one of `CODES`; pairs that could not be read are not in it."""
    missing: tuple[str, ...] = ()

    @property
    def all_ok(self) -> bool | None:
        """Whether every GPU reaches every other; None if all that could be read do, but some could not be read."""
        if any(code != "OK" for code in self.status.values()):
            return False
        return None if self.missing else True

    def between(self, a: int, b: int) -> str:
        """For `GpuPair.p2p`: a refusal in either direction counts for both; empty where the code is not known."""
        codes = [self.status.get((a, b), "U"), self.status.get((b, a), "U")]
        refused = [code for code in codes if code not in ("OK", "U")]
        return (refused or ["OK" if codes == ["OK", "OK"] else ""])[0]

    def plain(self) -> dict[str, Any]:
        """For JSON; the keys of `p2p` are `from-to`."""
        return {
            "gpus": len(self.gpus),
            "p2p": {f"{a}-{b}": code for (a, b), code in self.status.items()},
            "all_ok": self.all_ok,
            "missing": list(self.missing),
        }


def read_p2p_status(text: str) -> P2pStatus:
    """The matrix of `nvidia-smi topo -p2p r` (or w, n, a, p). NothingReadable if it has no heading of GPUs."""
    columns: list[int] = []
    rows: dict[int, dict[int, str]] = {}
    for line in lines(text):
        words = closed(line).split()
        if not words or not _GPU.fullmatch(words[0]):
            if columns and words == ["Legend:"]:
                break
            continue
        if not columns:
            columns = _columns(words)
        else:
            own, row = int(words[0][3:]), _row(words, columns)
            # Listed twice with two contents: neither can be believed.
            rows[own] = row if rows.get(own, row) == row else {}
    if not columns:
        raise nothing_readable("the matrix of nvidia-smi topo -p2p r, with its heading `GPU0 GPU1`")
    status = {(a, b): code for a in columns for b, code in rows.get(a, {}).items()}
    if not rows.keys() <= set(columns):
        # A name is damaged, in the heading or before a row: only names that stand in both are believed.
        status = {(a, b): code for (a, b), code in status.items() if b in rows}
    return P2pStatus(tuple(columns), status, _missing(columns, status))


def _columns(words: list[str]) -> list[int]:
    """The GPUs of the heading; nothing unless all its words are GPUs in order, as they always are."""
    found = [_GPU.fullmatch(word) for word in words]
    numbers = [int(match.group(1)) for match in found if match]
    return numbers if len(numbers) == len(words) and numbers == sorted(set(numbers)) else []


def _row(words: list[str], columns: list[int]) -> dict[int, str]:
    """Column → code; nothing unless the row is whole, with its X on the diagonal and nowhere else."""
    own, cells = int(words[0][3:]), words[1:]
    if len(cells) != len(columns) or [b for b, cell in zip(columns, cells, strict=True) if cell == "X"] != [own]:
        return {}
    return {b: cell for b, cell in zip(columns, cells, strict=True) if cell in CODES}


def _missing(columns: list[int], status: dict[tuple[int, int], str]) -> tuple[str, ...]:
    wanted = {a: len(columns) - 1 for a in columns}
    for a, _ in status:
        wanted[a] -= 1
    return tuple(f"GPU{a}: {left} of {len(columns) - 1} pairs could not be read" for a, left in wanted.items() if left)
