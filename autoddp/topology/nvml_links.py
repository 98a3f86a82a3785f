"""NVLinks: where those of each GPU lead, and what that makes of two GPUs.

    links = {index: read_links(library, handle, addresses) for index, handle in handles.items()}
    join(0, 1, links)               # {"nvlinks": 18, "nvlink_version": 4, "nvlink_gbs": 478.116}

Links into an NVSwitch count for every pair of GPUs that has some. The switches of a node are taken as one: they are
wired so that a GPU reaches any other with all its links, over whichever switch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoddp.topology.nvml_calls import INVALID_ARGUMENT, NOT_SUPPORTED, Library, Refusal

_SWITCH = -1  # as the far end of a link, beside the numbers of GPUs
_MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS; no GPU has them all, and NVML refuses the numbers a GPU does not have
_UP = 1  # NVML_FEATURE_ENABLED
_GPU_TYPE, _NPU_TYPE, _SWITCH_TYPE = 0, 1, 2  # NVML_NVLINK_DEVICE_TYPE_*

# NVLink version and GB/s of one link in one direction, by compute capability. Not by nvmlDeviceGetNvLinkVersion: it
# answers with the number of an enum, and drivers count that otherwise than nvml.h (an H100 says 7, there 5.0).
_KNOWN: dict[tuple[int, int], tuple[int, float]] = {
    (6, 0): (1, 20.0),
    (7, 0): (2, 25.0),
    (7, 5): (2, 25.0),
    (8, 0): (3, 25.0),
    (8, 6): (3, 14.0625),  # A40, A6000, RTX 3090: 56.25 GB/s over the four links of a bridge
    (9, 0): (4, 25.0),
    (10, 0): (5, 50.0),
    (10, 3): (5, 50.0),
}

_SPEED_OF_LINK, _SPEED_OF_ALL = 164, 90  # NVML_FI_DEV_NVLINK_GET_SPEED, _SPEED_MBPS_COMMON: MB/s, one direction
_VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # nvmlValueType_t → member of the union


@dataclass(frozen=True)
class Links:
    """The active NVLinks of one GPU."""

    ends: Mapping[int, int] = field(default_factory=dict)
    """GPU at the far end, or _SWITCH → number of links."""
    version: int | None = None
    gbs: float | None = None
    """GB/s of one link in one direction."""
    refused: str = ""
    """Why nothing could be learned, if so."""


def join(a: int, b: int, links: Mapping[int, Links]) -> dict[str, Any]:
    """The NVLinks over which GPUs a and b reach each other, as GpuPair names such facts; empty if there are none.

    Through switches the GPU with fewer links decides. A link between two GPUs counts if one of them tells of it.
    """
    one, other = links[a], links[b]
    count = max(one.ends.get(b, 0), other.ends.get(a, 0)) + min(one.ends.get(_SWITCH, 0), other.ends.get(_SWITCH, 0))
    if not count:
        return {}
    version = None if one.version is None or other.version is None else min(one.version, other.version)
    gbs = None if one.gbs is None or other.gbs is None else round(count * min(one.gbs, other.gbs), 3)
    return {"nvlinks": count, "nvlink_version": version, "nvlink_gbs": gbs}


def read_links(library: Library, gpu: Any, addresses: Mapping[str, int]) -> Links:
    """The links of a GPU, given its NVML handle and the numbers of all GPUs by PCI address.

    One link that is up and does not tell where it leads is a refusal: a count without it would be a guess.
    """
    try:
        up = [link for link in range(_MOST_LINKS) if _is_up(library, gpu, link)]
        ends = Counter(end for link in up if (end := _far_end(library, gpu, link, addresses)) is not None)
    except Refusal as refusal:
        return Links(refused=str(refusal))
    if not ends:
        return Links()
    version, usual = _known(library, gpu)
    told = _told(library, gpu, up[0])
    return Links(ends, version, usual if told is None else told)


def bus_address(pci: Any) -> str:
    """NVML's nvmlPciInfo_t as sysfs writes it: `0000:0f:00.0`."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _is_up(library: Library, gpu: Any, link: int) -> bool:
    try:
        return bool(library.ask("nvmlDeviceGetNvLinkState", gpu, link) == _UP)
    except Refusal as refusal:
        if refusal.code in (NOT_SUPPORTED, INVALID_ARGUMENT):  # a GPU without NVLink, or without that many
            return False
        raise


def _far_end(library: Library, gpu: Any, link: int, addresses: Mapping[str, int]) -> int | None:
    """A GPU's number, _SWITCH, or None for what is neither: a CPU, or a GPU that this container was not given."""
    try:
        kind = library.ask("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link)
    except Refusal:  # an old driver does not know the question
        kind = None
    if kind == _SWITCH_TYPE:  # whose address may be hidden in a virtual machine, so it is not asked for
        return _SWITCH
    address = bus_address(library.ask("nvmlDeviceGetNvLinkRemotePciInfo", gpu, link))
    if address in addresses:
        return addresses[address]
    return None if kind in (_GPU_TYPE, _NPU_TYPE) else _SWITCH


def _known(library: Library, gpu: Any) -> tuple[int | None, float | None]:
    try:
        capability = library.ask("nvmlDeviceGetCudaComputeCapability", gpu)
    except Refusal:
        return None, None
    return _KNOWN.get(tuple(capability), (None, None))


def _told(library: Library, gpu: Any, link: int) -> float | None:
    """GB/s of a link as the driver tells it; None if this driver does not."""
    try:
        values = library.ask("nvmlDeviceGetFieldValues", gpu, [(_SPEED_OF_LINK, link), (_SPEED_OF_ALL, 0)])
    except Refusal:
        return None
    for value in values:
        if value.nvmlReturn == 0 and value.valueType < len(_VALUE_TYPES):
            speed = getattr(value.value, _VALUE_TYPES[value.valueType])
            if speed > 0:
                return float(speed) / 1000
    return None
