"""Reads `nvidia-smi nvlink -s`: which NVLinks each GPU has, and how fast each is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from autoddp.topology.gpu_list import GpuHeading, gpu_heading
from autoddp.topology.text import closed, lines, not_read, nothing_readable

_LINK = re.compile(r"Link ([0-9]{1,2}): (?:([0-9]{1,4}(?:\.[0-9]{1,3})?) GB/s|<inactive>)")
_NONE_ACTIVE = "all links are inactive"


@dataclass(frozen=True)
class NvLink:
    """One link of a GPU."""

    number: int
    gbs: float | None
    """GB/s in one direction; None: the link is inactive."""


@dataclass(frozen=True)
class GpuLinks:
    """The links of one GPU."""

    index: int
    name: str = ""
    uuid: str = ""
    links: tuple[NvLink, ...] = ()
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
    def links(self) -> tuple[NvLink, ...]:
        """All of them."""
        return (*self.stray, *(link for gpu in self.gpus for link in gpu.links))

    @property
    def links_per_gpu(self) -> int | None:
        """How many links each GPU has, active or not; None if they differ or some could not be read."""
        counts = {len(gpu.links) for gpu in self.gpus}
        if self.missing or len(counts) > 1:
            return None
        return counts.pop() if counts else 0

    @property
    def speed_gbs(self) -> float | None:
        """GB/s of one link in one direction; None if there is no active link or they differ."""
        speeds = {link.gbs for link in self.links if link.gbs is not None}
        return speeds.pop() if len(speeds) == 1 else None

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        active = sum(link.gbs is not None for link in self.links)
        return {
            "gpus": len(self.gpus),
            "links_per_gpu": self.links_per_gpu,
            "speed_gbs": self.speed_gbs,
            "links_active": active,
            "links_inactive": len(self.links) - active,
            "inactive_gpus": [gpu.index for gpu in self.gpus if gpu.inactive],
            "per_gpu": [gpu.plain() for gpu in self.gpus],
            "missing": list(self.missing),
        }


@dataclass
class _Gpu:
    heading: GpuHeading
    links: list[NvLink] = field(default_factory=list)
    said_inactive: bool = False

    def takes(self, link: int) -> bool:
        """Links are numbered from 0 without a gap: another number may belong to a GPU whose line is lost."""
        return not self.said_inactive and link == len(self.links)

    def result(self) -> GpuLinks:
        gpu = self.heading
        return GpuLinks(gpu.index, gpu.name, gpu.uuid, tuple(self.links), self.said_inactive)


def read_nvlink_status(text: str) -> NvlinkStatus:
    """The NVLinks; no text at all is what nvidia-smi prints for GPUs without NVLink. NothingReadable for another text.

    After a line that could not be read it is not known whose the next links are: they count as stray.
    """
    gpus: dict[int, _Gpu] = {}
    stray: list[NvLink] = []
    unread: list[int] = []
    current: _Gpu | None = None
    for i, line in enumerate(lines(text), start=1):
        if heading := gpu_heading(line):
            current = gpus.setdefault(heading.index, _Gpu(heading)) if heading.index not in gpus else None
        elif found := _LINK.fullmatch(closed(line.strip())):
            link = NvLink(int(found.group(1)), float(found.group(2)) if found.group(2) else None)
            current = current if current and current.takes(link.number) else None
            (stray if current is None else current.links).append(link)
        elif current and not current.links and _NONE_ACTIVE in line.lower():
            current.said_inactive = True
        elif line:
            unread.append(i)
            current = None
    if unread and not (gpus or stray):
        raise nothing_readable("the output of nvidia-smi nvlink -s, with lines like `Link 0: 25 GB/s`")
    found_gpus = tuple(gpu.result() for gpu in gpus.values())
    return NvlinkStatus(found_gpus, tuple(stray), (*not_read(unread), *_doubts(found_gpus, stray)))


def _doubts(gpus: tuple[GpuLinks, ...], stray: list[NvLink]) -> list[str]:
    found = [f"{len(stray)} links belong to a GPU whose line could not be read"] if stray else []
    most: dict[str, int] = {}
    for gpu in gpus:
        most[gpu.name] = max(most.get(gpu.name, 0), len(gpu.links))
    for gpu in gpus:
        if not gpu.name:
            found.append(f"GPU {gpu.index}: its name could not be read")
        # Inactive links are listed too: GPUs of one model have equally many lines.
        listed = len(gpu.links)
        if gpu.name and listed < most[gpu.name] and not gpu.said_inactive:
            found.append(f"GPU {gpu.index}: {listed} links are listed, of another {gpu.name} {most[gpu.name]}")
    return found
