"""Finds the columns and rows of nvidia-smi's matrix in a text; `matrix.py` interprets their cells.

The matrix has one X in each row, where a device meets itself. An X in the column of the row's own name proves that no
cell before it was lost; the number of cells proves the rest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import dropwhile

from autoddp.topology.facts import P2P_REFUSED
from autoddp.topology.text import without_escapes

_GPU = re.compile(r"GPU(0|[1-9][0-9]{0,2})")
_NIC = re.compile(r"NIC[0-9]{1,4}|[a-z](?=[a-z_.-]*[0-9])[a-z0-9_.-]{0,62}")  # old drivers: the name of the device
_SEAM = re.compile(r"(?<=[0-9])(?=(?:GPU|NIC|mlx|hfi)[0-9])")  # between two names that lost the tab between them
_AFFINITY_NAME = re.compile(r"(CPU|NUMA)\s*Affinity|(GPU)\s*NUMA\s*ID")
_AFFINITY = re.compile(r"N/A|[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*")
_RELATION = re.compile(r"X|PIX|PXB|PHB|NODE|SYS|SOC|NV[1-9][0-9]?")  # SOC: what SYS was called until 2017
_PEER_ACCESS = frozenset(("OK", *P2P_REFUSED))  # of `nvidia-smi topo -p2p`, which may stand in the same paste
_MOST_GPUS = 1000  # a longer number is damage


def gpu_of(name: str | None) -> int | None:
    """The index in `GPU3`; None for any other name."""
    match = _GPU.fullmatch(name or "")
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Row:
    """One line of the matrix: the label and the words after it."""

    label: str
    cells: tuple[str, ...]
    open: bool = False
    """The text ends in this row: what is there of it is its beginning."""

    @cached_property
    def gpu(self) -> int | None:
        """The GPU whose row it is; None for a NIC's."""
        return gpu_of(self.label)

    @cached_property
    def diagonal(self) -> int:
        """The place of X; -1 if there is not exactly one."""
        return self.cells.index("X") if self.cells.count("X") == 1 else -1

    @cached_property
    def run(self) -> int:
        """How many cells are relations before the first one that is not."""
        return next((i for i, cell in enumerate(self.cells) if not _RELATION.fullmatch(cell)), len(self.cells))


@dataclass(frozen=True)
class Columns:
    """The header line. Where it is lost: the GPUs that the rows prove, and columns without a name."""

    names: tuple[str | None, ...]
    affinities: tuple[str, ...] = ("CPU", "NUMA", "GPU")
    header: bool = False

    @property
    def gpus(self) -> tuple[int, ...]:
        """The indices of the GPUs, in the order of their columns."""
        return tuple(gpu for name in self.names if (gpu := gpu_of(name)) is not None)

    @property
    def nics(self) -> tuple[str, ...]:
        """The names of all other columns that have one."""
        return tuple(name for name in self.names if name is not None and gpu_of(name) is None)

    def hold(self, row: Row) -> bool:
        """Whether the row's X is in the column of its name."""
        return 0 <= row.diagonal < len(self.names) and self.names[row.diagonal] == row.label

    def fit(self, row: Row) -> bool:
        """Whether the row has as many cells as there are columns; a cell that is no word of nvidia-smi's counts."""
        width = len(self.names)
        full = len(row.cells) == width + (len(self.affinities) if row.gpu is not None else 0)
        affinities = [i for i, cell in enumerate(row.cells) if _AFFINITY.fullmatch(cell)] if full else []
        return row.run == width or (full and affinities == list(range(width, len(row.cells))))

    def relations(self, row: Row) -> list[tuple[str, str]]:
        """The readable relations of a row that these columns hold, each with the name of its column."""
        before = max(row.run, row.diagonal) if row.open and row.run < len(self.names) else row.diagonal
        cells = row.cells[: len(self.names) if self.fit(row) else before]
        pairs = zip(self.names, cells, strict=False)
        return [(name, cell) for name, cell in pairs if name and name != row.label and _RELATION.fullmatch(cell)]

    def affinity(self, row: Row, column: str) -> str | None:
        """The word in an affinity column; None if it is blank or could be another column's.

        With fewer words than columns some are blank, and nothing says which.
        """
        words = row.cells[len(self.names) :]
        placed = len(words) == len(self.affinities) or (not self.header and "N/A" not in words)
        if row.gpu is None or not placed or not self.fit(row):
            return None
        word = dict(zip(self.affinities, words, strict=False)).get(column, "")
        return word if _AFFINITY.fullmatch(word) else None


@dataclass(frozen=True)
class Table:
    """The widest matrix of a text."""

    columns: Columns
    rows: list[Row]
    """Rows that the columns hold."""
    foreign: int
    """How many other lines look like rows: damaged ones, and those of other matrices."""


def table(text: str) -> Table:
    """The lines of a matrix; without columns and rows if there is none. Takes time in proportion to the text."""
    lines = _lines(without_escapes(text))
    headers = [(i, line) for i, line in enumerate(lines) if isinstance(line, Columns)]
    start, end, header = 0, len(lines), None
    if headers:
        start, header = max(headers, key=lambda found: len(found[1].names))
        end = next((i for i, other in headers if i > start and other.names != header.names), end)
    everywhere = _rows(lines)
    rows = _rows(lines[start:end]) or everywhere
    columns = max(_layouts(header, rows), key=lambda layout: sum(map(layout.hold, rows)))
    held = [row for row in rows if columns.hold(row)]
    return Table(columns, held, len(everywhere) - len(held))


def _rows(lines: list[Columns | Row]) -> list[Row]:
    """The rows, each once: a matrix printed again says nothing new."""
    return list(dict.fromkeys(line for line in lines if isinstance(line, Row)))


def _lines(text: str) -> list[Columns | Row]:
    lines: list[Columns | Row] = []
    of_last: list[Columns | Row] = []
    for line in text.splitlines():
        of_last = _of_one_line(line)
        lines += of_last
    ended = text[-1:].splitlines() != [text[-1:]]
    if of_last and not ended:
        last = lines.pop()
        if isinstance(last, Row):  # a header without an end is left out: names may be missing from it
            whole = last if text[-1].isspace() else _without_half_word(last, lines)
            lines.append(replace(whole, open=True))
    return lines


def _of_one_line(line: str) -> list[Columns | Row]:
    """Several where line breaks before a GPU's row were lost."""
    if "GPU" not in line:
        return [row for row in [_row(line.split())] if row]
    found: list[Columns | Row] = []
    above: list[str] = []
    for piece in [*re.split(r"(?=GPU[0-9])", line), ""]:
        row = _row(piece.split())
        if piece and not row:
            above.append(piece)
            continue
        header = _header("".join(above)) if above else None
        found += [item for item in (header, row) if item]
        above = []
    return found


def _row(words: list[str]) -> Row | None:
    if len(words) < 2 or not (_GPU.fullmatch(words[0]) or _NIC.fullmatch(words[0])):
        return None
    if _PEER_ACCESS & {*words[1:]}:
        return None
    return Row(words[0], tuple(words[1:])) if any(map(_RELATION.fullmatch, words[1:])) else None


def _header(line: str) -> Columns | None:
    affinity = _AFFINITY_NAME.search(line)
    words = line[: affinity.start() if affinity else None].split()
    names = [name for word in words for name in _SEAM.split(word)]
    last = max((i for i, name in enumerate(names) if _GPU.fullmatch(name)), default=len(names))
    times = Counter(names)  # a name that stands twice is damaged in one place, and nothing says in which
    readable = {
        i
        for i, name in enumerate(names)  # the GPUs stand first: another name among them is a damaged one
        if times[name] == 1 and (_GPU.fullmatch(name) or (i > last and _NIC.fullmatch(name)))
    }
    if last == len(names) or 2 * len(readable) <= len(names) or (len(names) == 1 and not affinity):
        return None
    affinities = tuple(match[1] or match[2] for match in _AFFINITY_NAME.finditer(line))
    return Columns(tuple(name if i in readable else None for i, name in enumerate(names)), affinities, header=True)


def _without_half_word(last: Row, others: list[Columns | Row]) -> Row:
    """NV1 may have been NV18 and 0-1 may have been 0-15; an affinity that ends another row as well is believed."""
    word = last.cells[-1]
    if word.startswith("NV"):
        believed = False
    elif _AFFINITY.fullmatch(word) and word != "N/A":
        rows = [row.cells for row in others if isinstance(row, Row)]
        believed = any(len(cells) == len(last.cells) and cells[-1] == word for cells in rows)
    else:
        believed = True  # no other word of nvidia-smi's begins another
    return last if believed else replace(last, cells=(*last.cells[:-1], "?"))


def _layouts(header: Columns | None, rows: list[Row]) -> Iterator[Columns]:
    """The ways to read the columns, the most likely first."""
    if header:
        yield _named_by_rows(header, rows)
        yield replace(header, names=tuple(dropwhile(lambda name: name is None, header.names)))  # a prompt before it
    yield _inferred(rows)


def _named_by_rows(header: Columns, rows: list[Row]) -> Columns:
    """The name of a column may come from the row whose X is in it: where it cannot be read, or is GPU92 for GPU2."""
    names, known, labels = list(header.names), set(header.names), {row.label for row in rows}
    for row in rows:
        at = row.diagonal
        if row.gpu is None or row.open or row.label in known or not 0 <= at < len(names) or not header.fit(row):
            continue
        if names[at] is None or (row.gpu == at and names[at] not in labels):
            names[at] = row.label
            known.add(row.label)
    return replace(header, names=tuple(names))


def _inferred(rows: list[Row]) -> Columns:
    """Without a header: GPU0 and the next ones, up to the last that its own X or an NVLink to it proves."""
    placed = [row for row in rows if row.gpu is not None and row.gpu == row.diagonal]
    if not placed:
        return Columns(())
    widths = Counter(row.run for row in placed if not row.open) or Counter(row.run for row in placed)
    width = max(widths, key=lambda run: (widths[run], run))
    proofs = (
        i
        for row in placed
        for i, cell in enumerate(row.cells[: max(row.diagonal + 1, row.run if row.open or row.run == width else 0)])
        if cell == "X" or cell.startswith("NV")
    )
    gpus = min(1 + max(proofs), _MOST_GPUS)
    return Columns((*(f"GPU{i}" for i in range(gpus)), *(None for _ in range(width - gpus))))
