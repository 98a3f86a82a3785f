"""Reads `lspci -nn`: the GPUs, NVSwitches and network controllers on the PCI buses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from autoddp.topology.text import closed, lines, not_read, nothing_readable, pci_address

# `Infiniband controller [0207]: Mellanox Technologies … [15b3:101c] (rev 80)`
_REST = re.compile(
    r"[^\[]{1,80} \[([0-9a-f]{4})\]: ([ -~]{1,300}) \[([0-9a-f]{4}):([0-9a-f]{4})\](?: \([^)]{1,40}\)){0,3}"
)
_NVIDIA, _MELLANOX = "10de", "15b3"
_DISPLAY, _ETHERNET, _INFINIBAND, _BRIDGE = ("0300", "0302"), "0200", "0207", "0680"
_CHIPSETS_END = 0x1000  # NVIDIA's mainboard chipsets of the 2000s, which had such bridges too, lie below


@dataclass(frozen=True)
class PciDevice:
    """One line."""

    bus: str
    """`0000:0f:00.0`, or without the domain."""
    pci_class: str
    """Four hexadecimal digits, `0302`."""
    vendor: str
    device: str
    name: str

    @property
    def is_nvidia_gpu(self) -> bool:
        """A display or 3D controller of NVIDIA's."""
        return self.vendor == _NVIDIA and self.pci_class in _DISPLAY

    @property
    def is_nvswitch(self) -> bool:
        """The switch between the NVLinks of an HGX board shows as a bridge."""
        return self.vendor == _NVIDIA and self.pci_class == _BRIDGE and int(self.device, 16) >= _CHIPSETS_END


@dataclass(frozen=True)
class Lspci:
    """The devices, in their order. A container or virtual machine may see fewer than there are."""

    devices: tuple[PciDevice, ...]
    missing: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON: how many of what matters here, and the devices of those vendors and classes."""
        gpus = [device for device in self.devices if device.is_nvidia_gpu]
        switches = [device for device in self.devices if device.is_nvswitch]
        infiniband = [device for device in self.devices if device.pci_class == _INFINIBAND]
        ethernet = [d for d in self.devices if d.vendor == _MELLANOX and d.pci_class == _ETHERNET]
        return {
            "nvidia_gpus": len(gpus),
            "nvswitch": len(switches),
            "infiniband_controllers": len(infiniband),
            "mellanox_ethernet": len(ethernet),
            "devices": [dict(vars(device)) for device in (*gpus, *switches, *infiniband, *ethernet)],
            "missing": list(self.missing),
        }


def read_lspci(text: str) -> Lspci:
    """The devices of `lspci -nn` (also -nnv, whose details are passed over). NothingReadable without their numbers."""
    devices: dict[str, PciDevice] = {}
    unread = []
    for i, line in enumerate(lines(text), start=1):
        if not line or line[0].isspace():
            continue
        device = _device(line)
        if device is None or devices.setdefault(device.bus, device) != device:
            unread.append(i)
    if not devices:
        raise nothing_readable("the output of lspci -nn, with numbers such as `[0302]` and `[10de:20b2]` in each line")
    return Lspci(tuple(devices.values()), not_read(unread))


def _device(line: str) -> PciDevice | None:
    bus, _, rest = line.partition(" ")
    found = _REST.fullmatch(closed(rest))
    if pci_address(bus) is None or found is None:
        return None
    pci_class, name, vendor, device = found.groups()
    if name.count("[") != name.count("]"):  # what is left of two lines
        return None
    return PciDevice(bus, pci_class, vendor, device, name)
