"""Reads how AMD's GPUs are joined, from the output of `rocm-smi --showtopo`.

    read_links(text)        # {'0-1': 'XGMI', '0-2': 'PCIE'}

Of its tables only "Link Type between two GPUs" is read, and the NUMA affinity below: weights and hops tell no rate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoddp.topology.text import closed, lines

_TITLE = re.compile(r"=*\s*Link Type between two GPUs\s*=*")
_OTHER_TITLE = re.compile(r"={3,}.*")
_GPU = re.compile(r"GPU([0-9]{1,3})")
_NUMA = re.compile(r"GPU\[([0-9]{1,3})\]\s*: \(Topology\) Numa Affinity: ([0-9]{1,4})")
_OWN = "0"  # where a GPU meets itself
_WORDS = ("XGMI", "PCIE")


@dataclass(frozen=True)
class AmdLinks:
    """What is certain of the table of link types."""

    gpus: tuple[int, ...]
    links: dict[str, str]
    """`0-1` → XGMI or PCIE, where both directions say the same."""
    numa: dict[int, str]
    """GPU → the NUMA node that it is near to."""


def is_rocm_smi(text: str) -> bool:
    """Whether the text has a table of rocm-smi's."""
    return any(_TITLE.fullmatch(line) for line in lines(text))


def read_links(text: str) -> AmdLinks:
    """The table of link types; one without GPUs if it could not be read."""
    columns: list[int] = []
    said: dict[tuple[int, int], set[str]] = {}
    numa: dict[int, str] = {}
    inside = False
    for line in map(closed, lines(text)):
        words = line.split()
        if found := _NUMA.fullmatch(line):
            numa[int(found[1])] = found[2]
        elif _OTHER_TITLE.fullmatch(line):
            inside = bool(_TITLE.fullmatch(line))
        elif inside and words and all(map(_GPU.fullmatch, words)):
            columns = [int(word[3:]) for word in words]
        elif inside and columns and words and (row := _GPU.fullmatch(words[0])) and len(words) == len(columns) + 1:
            for other, cell in zip(columns, words[1:], strict=True):
                if other != int(row[1]) and cell != _OWN:
                    said.setdefault((min(other, int(row[1])), max(other, int(row[1]))), set()).add(cell)
    links = {f"{a}-{b}": next(iter(cells)) for (a, b), cells in sorted(said.items()) if len(cells) == 1}
    return AmdLinks(tuple(columns), {pair: word for pair, word in links.items() if word in _WORDS}, numa)
