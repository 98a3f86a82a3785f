"""Reads the matrix of `nvidia-smi topo -m` from text that may have been cut, re-spaced, coloured or damaged.

matrix = read_matrix(ask("topo", "-m"))
matrix.links["0-1"]         # 'NV18'
matrix.missing              # (), or sentences about what could not be read
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from autoddp.errors import NothingReadable
from autoddp.topology.nvidia.matrix_rows import Table, gpu_of, table
from autoddp.topology.rocm_smi import AmdLinks, is_rocm_smi, read_links
from autoddp.topology.text import some

_LEGEND = re.compile(r"\s*(NIC[0-9]{1,4})\s*:\s*(\S{1,64})\s*")

_Key = TypeVar("_Key")
_Said = dict[_Key, set[str]]  # all that the text says of a thing: two different words contradict each other


@dataclass(frozen=True)
class TopologyMatrix:
    """What is certain of the matrix.

    >>> matrix = read_matrix("GPU0    GPU1    CPU Affinity\\nGPU0     X      NV4     0-11\\nGPU1    NV4      X      0")
    >>> matrix.links, matrix.cpu_affinity, matrix.missing
    ({'0-1': 'NV4'}, {0: '0-11'}, ('the CPU affinity could not be read of GPU1',))

    Relations are nvidia-smi's words, nearest first: NV# (# NVLinks), PIX, PXB, PHB, NODE, SYS (SOC in old drivers); of
    AMD's GPUs rocm-smi's, XGMI and PCIE.
    Not promised: that what is absent is not in the machine.
    """

    gpus: tuple[int, ...]
    """The GPUs that have a column; without a header line, those of which a cell proves it."""
    links: dict[str, str]
    """`0-1` → relation, the lower GPU first."""
    rows_present: tuple[int, ...]
    """The GPUs of which a row could be read, perhaps not to its end."""
    nics: int | None
    """Columns of network interfaces, None if that is not certain. nvidia-smi shows 56 at most."""
    nic_names: tuple[str, ...] | None
    """RDMA devices of the network interfaces, in the order of the columns; None if not all are known."""
    nic_links: dict[int, dict[str, str]]
    """GPU → column of a NIC as the header has it (`NIC0`, `mlx5_0`) → relation."""
    cpu_affinity: dict[int, str]
    """GPU → CPUs as printed, `0-23,48-71`: only those that the process which ran nvidia-smi was allowed to use."""
    numa_affinity: dict[int, str]
    """GPU → NUMA nodes as printed, `0` or `N/A`."""
    missing: tuple[str, ...]
    """What could not be read, a sentence for each kind. A blank affinity counts as read."""

    @property
    def complete(self) -> bool:
        """Whether everything could be read."""
        return not self.missing

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "gpus": len(self.gpus),
            "link_gpu0_gpu1": self.links.get("0-1"),
            "link_types": sorted(set(self.links.values())),
            "nics": self.nics,
            "nic_names": None if self.nic_names is None else list(self.nic_names),
            "complete": self.complete,
            "rows_present": list(self.rows_present),
            "gpu_links": dict(self.links),
            "cpu_affinity": {str(gpu): cpus for gpu, cpus in self.cpu_affinity.items()},
            "numa_affinity": {str(gpu): nodes for gpu, nodes in self.numa_affinity.items()},
            "missing": list(self.missing),
        }


def read_matrix(text: str) -> TopologyMatrix:
    """All that is certain of the matrix in `text`, of the widest if there are several; NothingReadable without one.

    A relation is certain if every cell about it that can be read, in its row and in its column, says the same.
    """
    if is_rocm_smi(text):
        return _of_amd(read_links(text))
    found = table(text)
    if not found.columns.gpus:
        raise NothingReadable(
            f"no GPU matrix in the text {' '.join(text[:200].split())[:40]!r}: expected the output of "
            "`nvidia-smi topo -m`, with a row like 'GPU0  X  NV18  …' for each GPU, or of `rocm-smi --showtopo`"
        )
    links, nic_links = _relations(found)
    cpus, nodes = _affinities(found, "CPU"), _affinities(found, "NUMA")
    legend, nics = _legend(text), found.columns.nics if _columns_are_sure(found) else None
    near: dict[int, dict[str, str]] = defaultdict(dict)
    for (gpu, nic), relation in _agreed(nic_links).items():
        near[gpu][nic] = relation
    return TopologyMatrix(
        gpus=found.columns.gpus,
        links={f"{a}-{b}": relation for (a, b), relation in _agreed(links).items()},
        rows_present=tuple(sorted({row.gpu for row in found.rows if row.gpu is not None})),
        nics=None if nics is None else len(nics),
        nic_names=_nic_names(nics, legend),
        nic_links=dict(near),
        cpu_affinity=_agreed(cpus),
        numa_affinity=_agreed(nodes),
        missing=(
            *_missing_columns(found, legend),
            *_missing_rows(found),
            *_missing_relations(found, links, nic_links),
            *_missing_affinities(found, "CPU", cpus),
            *_missing_affinities(found, "NUMA", nodes),
        ),
    )


def _of_amd(found: AmdLinks) -> TopologyMatrix:
    if not found.gpus:
        raise NothingReadable("rocm-smi's table of link types could not be read: it needs its heading `GPU0 GPU1`")
    pairs = len(found.gpus) * (len(found.gpus) - 1) // 2
    unread = pairs - len(found.links)
    return TopologyMatrix(
        gpus=found.gpus,
        links=found.links,
        rows_present=found.gpus,
        nics=None,
        nic_names=None,
        nic_links={},
        cpu_affinity={},
        numa_affinity=found.numa,
        missing=(f"{unread} of {pairs} GPU links could not be read",) if unread else (),
    )


def _agreed(said: _Said[_Key]) -> dict[_Key, str]:
    return {key: next(iter(words)) for key, words in sorted(said.items()) if len(words) == 1}


def _relations(found: Table) -> tuple[_Said[tuple[int, int]], _Said[tuple[int, str]]]:
    """All that the cells say of two GPUs, and of a GPU and a NIC."""
    links: _Said[tuple[int, int]] = defaultdict(set)
    nic_links: _Said[tuple[int, str]] = defaultdict(set)
    for row in found.rows:
        for name, cell in found.columns.relations(row):
            one, other = row.gpu, gpu_of(name)
            if one is not None and other is not None:
                links[min(one, other), max(one, other)].add(cell)
            elif cell.startswith("NV"):
                continue  # no NIC has NVLink: the cell is another column's
            elif one is not None:
                nic_links[one, name].add(cell)
            elif other is not None:
                nic_links[other, row.label].add(cell)
    return links, nic_links


def _affinities(found: Table, column: str) -> _Said[int]:
    said: _Said[int] = defaultdict(set)
    for row in found.rows:
        word = found.columns.affinity(row, column)
        if row.gpu is not None and word is not None:
            said[row.gpu].add(word)
    return said


def _legend(text: str) -> dict[str, set[str]]:
    """The names below the matrix. The last line of a text that ends without a line break may be half a name."""
    said: _Said[str] = defaultdict(set)
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("NIC") and (match := _LEGEND.fullmatch(line)):
            said[match[1]] |= {match[2]} if line[-1].isspace() else {match[2], ""}
    return said


def _columns_are_sure(found: Table) -> bool:
    """Whether the header line names all columns: if a name was lost, every row has more cells than the header names."""
    columns, rows = found.columns, found.rows
    borne_out = all(row.open for row in rows) or any(map(columns.fit, rows))
    return columns.header and None not in columns.names and borne_out


def _nic_names(nics: tuple[str, ...] | None, legend: _Said[str]) -> tuple[str, ...] | None:
    names = {name: name for name in nics or () if not name.startswith("NIC")} | _agreed(legend)
    return tuple(names[nic] for nic in nics) if nics and names.keys() >= set(nics) else None


def _missing_columns(found: Table, legend: _Said[str]) -> Iterator[str]:
    if not found.columns.header:
        yield "no header line fits the rows: the GPUs were inferred from them, the NICs are not known"
    elif not _columns_are_sure(found):
        yield "the header line is damaged: how many NICs there are is not known"
    elif legend and _nic_names(found.columns.nics, legend) is None:
        yield "the NIC legend does not name every NIC"


def _missing_rows(found: Table) -> Iterator[str]:
    there = {row.label for row in found.rows}
    absent = [name for name in found.columns.names if name is not None and name not in there]
    if absent:
        yield f"no row could be read of {some(absent)}"
    partly = dict.fromkeys(row.label for row in found.rows if not found.columns.fit(row))
    if partly:
        yield f"the row is cut or damaged of {some(partly)}"
    if found.foreign:
        yield f"lines that look like rows but fit no header, or belong to another matrix: {found.foreign}"


def _missing_relations(found: Table, links: _Said[tuple[int, int]], nic_links: _Said[tuple[int, str]]) -> Iterator[str]:
    gpus = len(found.columns.gpus)
    pairs = gpus * (gpus - 1) // 2
    if unread := pairs - len(_agreed(links)):
        yield f"{unread} of {pairs} GPU links could not be read"
    against = [f"{a}-{b} ({' or '.join(sorted(words))})" for (a, b), words in sorted(links.items()) if len(words) > 1]
    if against:
        yield f"the two directions contradict each other between GPUs {some(against)}"
    cells = gpus * len(found.columns.nics) if found.columns.header else 0
    if (unread := cells - len(_agreed(nic_links))) > 0:
        yield f"{unread} of {cells} relations of a GPU and a NIC could not be read"


def _missing_affinities(found: Table, column: str, said: _Said[int]) -> Iterator[str]:
    """A sentence about the GPUs whose affinity could not be read, if there are any.

    Blanks for some GPUs only count as not read. All are blank in a container or under Windows, which is no loss.
    """
    width, known = len(found.columns.names), _agreed(said)
    doubtful = {
        row.gpu
        for row in found.rows
        if row.gpu is not None and (known or not found.columns.fit(row) or {*row.cells[width:]} - {"N/A"})
    }
    unread = [f"GPU{gpu}" for gpu in sorted(doubtful - known.keys())]
    if unread and column in found.columns.affinities:
        yield f"the {column} affinity could not be read of {some(unread)}"
