"""Readers of three outputs of nvidia-smi: `-L` (GPUs and MIG devices), `nvlink -s` and `topo -p2p r` (peer access).

    read_nvlink_status(text).links_per_gpu      # 18
    read_p2p_status(text).between(0, 1)         # 'OK'

The first two list a line for each GPU with its devices or links below it. `missing` says in sentences what could not be
read; a text of which nothing can be read raises NothingReadable.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autoddp.topology.facts import P2P_REFUSED
from autoddp.topology.text import closed, lines, not_read, nothing_readable

_HEX = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_GPU_UUID = re.compile(rf"GPU-{_HEX}")
_MIG_UUID = re.compile(rf"MIG-{_HEX}|MIG-GPU-{_HEX}/[0-9]{{1,3}}/[0-9]{{1,3}}")  # the second by drivers before 470
_GPU = re.compile(r"GPU ([0-9]{1,3}): (.*)")
_NAME_AND_UUID = re.compile(r"([A-Za-z0-9][A-Za-z0-9 ._+/-]{0,99}) \(UUID: ([^()]{1,100})\)")
_MIG = re.compile(r"MIG ([0-9a-z.+-]{1,32}) +Device +([0-9]{1,2}): \(UUID: ([^()]{1,100})\)")
_LINK = re.compile(r"Link ([0-9]{1,2}): (?:([0-9]{1,4}(?:\.[0-9]{1,3})?) GB/s|<inactive>)")
_COLUMN = re.compile(r"GPU([0-9]{1,3})")

_P2P_CODES = {"OK", "U", *P2P_REFUSED}  # U: the driver does not know


@dataclass(frozen=True)
class SmiGpu:
    """A line `GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-…)`; a name or UUID that could not be read is empty."""

    index: int
    name: str = ""
    uuid: str = ""


def _gpu(line: str) -> SmiGpu | None:
    if not (found := _GPU.fullmatch(closed(line))):
        return None
    rest = _NAME_AND_UUID.fullmatch(found[2])
    uuid = rest[2] if rest and _GPU_UUID.fullmatch(rest[2]) else ""
    return SmiGpu(int(found[1]), rest[1] if rest else "", uuid)


@dataclass(frozen=True)
class MigDevice:
    """A slice of a GPU."""

    number: int
    profile: str
    """`1g.10gb`: compute slices and memory."""
    uuid: str


@dataclass(frozen=True)
class ListedGpu(SmiGpu):
    """A physical GPU and the MIG devices it is divided into."""

    mig: list[MigDevice] = field(default_factory=list)


@dataclass(frozen=True)
class GpuList:
    """What `nvidia-smi -L` lists."""

    gpus: tuple[ListedGpu, ...] = ()
    stray: tuple[MigDevice, ...] = ()
    """MIG devices whose GPU could not be read."""
    missing: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON; `mig`: whether any GPU is divided into MIG devices, between which there is no peer access."""
        devices = len(self.stray) + sum(len(gpu.mig) for gpu in self.gpus)
        return {"physical_gpus": len(self.gpus), "mig_devices": devices, "mig": devices > 0} | asdict(self)


def read_gpu_list(text: str) -> GpuList:
    """What `nvidia-smi -L` lists; nothing where it says "No devices found." NothingReadable for another text."""
    gpus: list[ListedGpu] = []
    stray: list[MigDevice] = []
    unread: list[int] = []
    current, said_none = stray, False  # `current`: the MIG devices of the GPU whose line was read last
    for i, line in enumerate(lines(text), start=1):
        if gpu := _gpu(line):
            if gpus and gpu.index <= gpus[-1].index:  # GPUs are listed in order
                unread.append(i)
                current = stray
            else:
                gpus.append(ListedGpu(**vars(gpu)))
                current = gpus[-1].mig
        elif found := _MIG.fullmatch(closed(line.strip())):
            profile, number, uuid = found[1], int(found[2]), found[3]
            # Device numbers begin anew with each GPU: a number that does not rise belongs to a GPU whose line is lost.
            if current and number <= current[-1].number:
                current = stray
            current.append(MigDevice(number, profile, uuid if _MIG_UUID.fullmatch(uuid) else ""))
        elif closed(line) == "No devices found.":
            said_none = True
        elif line:
            unread.append(i)
            current = current if line[0].isspace() else stray
    if not (gpus or stray or said_none):
        example = "the output of nvidia-smi -L, with lines like `GPU 0: NVIDIA A100 (UUID: GPU-…)`"
        raise nothing_readable(example, text.count("\n") + 1)
    last = gpus[-1].index if gpus else -1
    skipped = [f"{last + 1 - len(gpus)} of GPUs 0 to {last} are not listed"] if last + 1 > len(gpus) else []
    nameless = [f"GPU {gpu.index}: its name or UUID could not be read" for gpu in gpus if not gpu.uuid]
    return GpuList(tuple(gpus), tuple(stray), (*not_read(unread), *skipped, *nameless))


@dataclass(frozen=True)
class NvLink:
    """One link of a GPU."""

    number: int
    gbs: float | None
    """GB/s in one direction; None: the link is inactive."""


@dataclass(frozen=True)
class GpuLinks(SmiGpu):
    """The links of one GPU."""

    links: list[NvLink] = field(default_factory=list)
    said_inactive: bool = False
    """nvidia-smi said so for the whole GPU, and listed no link."""

    @property
    def active(self) -> int:
        """How many links carry traffic."""
        return sum(link.gbs is not None for link in self.links)

    @property
    def inactive(self) -> bool:
        """Whether it has links and none of them is active."""
        return self.said_inactive or (bool(self.links) and not self.active)

    def plain(self) -> dict[str, Any]:
        """For JSON; `speeds_gbs` link by link, null for an inactive one."""
        return {
            "gpu": self.index,
            "name": self.name,
            "uuid": self.uuid,
            "links": len(self.links),
            "links_active": self.active,
            "links_inactive": len(self.links) - self.active,
            "speeds_gbs": {str(link.number): link.gbs for link in self.links},
            "inactive": self.inactive,
        }


@dataclass(frozen=True)
class NvlinkStatus:
    """The GPUs that were listed; without NVLink there are none."""

    gpus: tuple[GpuLinks, ...] = ()
    stray: tuple[NvLink, ...] = ()
    """Links of a GPU whose own line could not be read."""
    missing: tuple[str, ...] = ()

    @property
    def speeds(self) -> list[float]:
        """GB/s of each active link in one direction."""
        links = (*self.stray, *(link for gpu in self.gpus for link in gpu.links))
        return [link.gbs for link in links if link.gbs is not None]

    @property
    def links_per_gpu(self) -> int | None:
        """How many links each GPU has, active or not; None if they differ or some could not be read."""
        counts = {len(gpu.links) for gpu in self.gpus} or {0}
        return None if self.missing or len(counts) > 1 else counts.pop()

    @property
    def speed_gbs(self) -> float | None:
        """GB/s of one link in one direction; None if there is no active link or they differ."""
        speeds = set(self.speeds)
        return speeds.pop() if len(speeds) == 1 else None

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        links, active = len(self.stray) + sum(len(gpu.links) for gpu in self.gpus), len(self.speeds)
        return {
            "gpus": len(self.gpus),
            "links_per_gpu": self.links_per_gpu,
            "speed_gbs": self.speed_gbs,
            "links_active": active,
            "links_inactive": links - active,
            "inactive_gpus": [gpu.index for gpu in self.gpus if gpu.inactive],
            "per_gpu": [gpu.plain() for gpu in self.gpus],
            "missing": list(self.missing),
        }


def read_nvlink_status(text: str) -> NvlinkStatus:
    """The NVLinks; no text at all is what nvidia-smi prints for GPUs without NVLink. NothingReadable for another text.

    After a line that could not be read nothing tells which GPU the next links belong to: they count as stray.
    """
    gpus: dict[int, GpuLinks] = {}
    stray: list[NvLink] = []
    unread: list[int] = []
    current: GpuLinks | None = None
    for i, line in enumerate(lines(text), start=1):
        if gpu := _gpu(line):
            current = None if gpu.index in gpus else gpus.setdefault(gpu.index, GpuLinks(**vars(gpu)))
        elif found := _LINK.fullmatch(closed(line.strip())):
            link = NvLink(int(found[1]), float(found[2]) if found[2] else None)
            # Links are numbered from 0 without a gap: another number may belong to a GPU whose line is lost.
            if current and (current.said_inactive or link.number != len(current.links)):
                current = None
            (stray if current is None else current.links).append(link)
        elif current and not current.links and "all links are inactive" in line.lower():
            current = gpus[current.index] = replace(current, said_inactive=True)
        elif line:
            unread.append(i)
            current = None
    if unread and not (gpus or stray):
        example = "the output of nvidia-smi nvlink -s, with lines like `Link 0: 25 GB/s`"
        raise nothing_readable(example, text.count("\n") + 1)
    return NvlinkStatus(tuple(gpus.values()), tuple(stray), (*not_read(unread), *_doubts([*gpus.values()], stray)))


def _doubts(gpus: list[GpuLinks], stray: list[NvLink]) -> list[str]:
    found = [f"{len(stray)} links belong to a GPU whose line could not be read"] if stray else []
    for gpu in gpus:
        # Inactive links are listed too: GPUs of one model have equally many lines.
        listed, most = len(gpu.links), max(len(other.links) for other in gpus if other.name == gpu.name)
        if not gpu.name:
            found.append(f"GPU {gpu.index}: its name could not be read")
        elif listed < most and not gpu.said_inactive:
            found.append(f"GPU {gpu.index}: {listed} links are listed, of another {gpu.name} {most}")
    return found


@dataclass(frozen=True)
class P2pStatus:
    """The matrix of peer access: which GPUs may reach into each other's memory."""

    gpus: tuple[int, ...]
    status: dict[tuple[int, int], str]
    """(from, to) → OK, U (the driver does not know) or a key of `P2P_REFUSED`; without pairs that could not be read."""
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
        status = {f"{a}-{b}": code for (a, b), code in self.status.items()}
        return {"gpus": len(self.gpus), "p2p": status, "all_ok": self.all_ok, "missing": list(self.missing)}


def read_p2p_status(text: str) -> P2pStatus:
    """The matrix of `nvidia-smi topo -p2p r` (or w, n, a, p). NothingReadable if it has no heading of GPUs."""
    columns: list[int] = []
    rows: dict[int, dict[int, str]] = {}
    for line in lines(text):
        words = closed(line).split()
        if columns and words == ["Legend:"]:
            break
        numbers = [int(gpu[1]) for word in words if (gpu := _COLUMN.fullmatch(word))]
        if not words or not _COLUMN.fullmatch(words[0]):
            continue
        if not columns:  # a heading has only GPUs, in order
            columns = numbers if len(numbers) == len(words) and numbers == sorted(set(numbers)) else []
        else:
            row = _cells(numbers[0], words[1:], columns)
            # A row that is listed twice with two contents is not believed in either.
            rows[numbers[0]] = row if rows.get(numbers[0], row) == row else {}
    if not columns:
        example = "the matrix of nvidia-smi topo -p2p r, with its heading `GPU0 GPU1`"
        raise nothing_readable(example, text.count("\n") + 1)
    # If a row is not in the heading, one of the names is damaged: only names that stand in both are believed.
    known = set(columns) if rows.keys() <= set(columns) else rows.keys() & set(columns)
    believed = {a: {b: code for b, code in rows.get(a, {}).items() if b in known} for a in columns}
    status = {(a, b): code for a, row in believed.items() for b, code in row.items()}
    others = len(columns) - 1
    left = {a: others - len(row) for a, row in believed.items()}
    missing = [f"GPU{a}: {count} of {others} pairs could not be read" for a, count in left.items() if count]
    return P2pStatus(tuple(columns), status, tuple(missing))


def _cells(own: int, cells: list[str], columns: list[int]) -> dict[int, str]:
    """Column → code; nothing unless the row is whole, with its X on the diagonal and nowhere else."""
    row = [*zip(columns, cells, strict=False)]
    if len(cells) != len(columns) or [b for b, cell in row if cell == "X"] != [own]:
        return {}
    return {b: cell for b, cell in row if cell in _P2P_CODES}
