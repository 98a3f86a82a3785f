"""Reads `nvidia-smi -L`: the GPUs and the MIG devices they are cut into."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from autoddp.topology.text import closed, lines, not_read, nothing_readable

_HEX = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_GPU_UUID = re.compile(rf"GPU-{_HEX}")
_MIG_UUID = re.compile(rf"MIG-{_HEX}|MIG-GPU-{_HEX}/[0-9]{{1,3}}/[0-9]{{1,3}}")  # the second by drivers before 470
_GPU = re.compile(r"GPU ([0-9]{1,3}): (.*)")
_NAME_AND_UUID = re.compile(r"([A-Za-z0-9][A-Za-z0-9 ._+/-]{0,99}) \(UUID: ([^()]{1,100})\)")
_MIG = re.compile(r"MIG ([0-9a-z.+-]{1,32}) +Device +([0-9]{1,2}): \(UUID: ([^()]{1,100})\)")
_NO_DEVICES = "No devices found."


@dataclass(frozen=True)
class GpuHeading:
    """A line `GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-…)`; what of it could not be read is empty."""

    index: int
    name: str
    uuid: str


def gpu_heading(line: str) -> GpuHeading | None:
    """The line as a heading, if it is one."""
    if not (found := _GPU.fullmatch(closed(line))):
        return None
    rest = _NAME_AND_UUID.fullmatch(found.group(2))
    return GpuHeading(int(found.group(1)), rest.group(1) if rest else "", gpu_uuid(rest.group(2)) if rest else "")


def gpu_uuid(text: str) -> str:
    """The UUID of a GPU; empty if it is none, or damaged."""
    return text if _GPU_UUID.fullmatch(text) else ""


@dataclass(frozen=True)
class MigDevice:
    """A slice of a GPU."""

    number: int
    profile: str
    """`1g.10gb`: compute slices and memory."""
    uuid: str


@dataclass(frozen=True)
class ListedGpu:
    """A physical GPU."""

    index: int
    name: str
    uuid: str
    mig: tuple[MigDevice, ...] = ()


@dataclass(frozen=True)
class GpuList:
    """What `nvidia-smi -L` lists."""

    gpus: tuple[ListedGpu, ...] = ()
    stray: tuple[MigDevice, ...] = ()
    """MIG devices whose GPU could not be read."""
    missing: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON; `mig`: whether any GPU is cut into MIG devices, between which there is no peer access."""
        devices = len(self.stray) + sum(len(gpu.mig) for gpu in self.gpus)
        numbers = {"physical_gpus": len(self.gpus), "mig_devices": devices, "mig": devices > 0}
        return numbers | asdict(self) | {"missing": list(self.missing)}


@dataclass
class _Listing:
    gpus: dict[GpuHeading, list[MigDevice]] = field(default_factory=dict)
    stray: list[MigDevice] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    last: int = -1
    """Index of the GPU read last: they are listed in order."""
    current: list[MigDevice] | None = None

    def gpu(self, heading: GpuHeading) -> bool:
        self.current = None
        if heading.index <= self.last:
            return False
        self.last, self.current = heading.index, self.gpus.setdefault(heading, [])
        return True

    def mig(self, device: MigDevice) -> None:
        # Numbers begin anew with each GPU: a number that does not rise belongs to a GPU whose line is lost.
        if self.current and device.number <= self.current[-1].number:
            self.current = None
        (self.stray if self.current is None else self.current).append(device)


def read_gpu_list(text: str) -> GpuList:
    """What `nvidia-smi -L` lists; nothing where it says "No devices found." NothingReadable for another text."""
    listing, said_none = _Listing(), False
    for i, line in enumerate(lines(text), start=1):
        if heading := gpu_heading(line):
            if not listing.gpu(heading):
                listing.unread.append(i)
        elif found := _MIG.fullmatch(closed(line.strip())):
            profile, which, told = found.groups()
            listing.mig(MigDevice(int(which), profile, told if _MIG_UUID.fullmatch(told) else ""))
        elif closed(line) == _NO_DEVICES:
            said_none = True
        elif line:
            listing.unread.append(i)
            listing.current = listing.current if line[0].isspace() else None
    if not (listing.gpus or listing.stray or said_none):
        raise nothing_readable("the output of nvidia-smi -L, with lines like `GPU 0: NVIDIA A100 (UUID: GPU-…)`")
    gpus = tuple(ListedGpu(gpu.index, gpu.name, gpu.uuid, tuple(mig)) for gpu, mig in listing.gpus.items())
    nameless = tuple(f"GPU {gpu.index}: its name or UUID could not be read" for gpu in gpus if not gpu.uuid)
    return GpuList(gpus, tuple(listing.stray), (*not_read(listing.unread), *_gaps(gpus), *nameless))


def _gaps(gpus: tuple[ListedGpu, ...]) -> tuple[str, ...]:
    last = max((gpu.index for gpu in gpus), default=-1)
    skipped = last + 1 - len(gpus)
    return (f"{skipped} of GPUs 0 to {last} are not listed",) if skipped else ()
