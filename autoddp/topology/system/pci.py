"""How far two PCI devices are from each other, by their paths in sysfs.

The path of a device names every bridge above it: `pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0`. What two devices
share of it is what their traffic need not leave.
"""

from __future__ import annotations

from pathlib import Path

from autoddp.topology.facts import Relation
from autoddp.topology.system.files import numa_node


def path_of(bus: str, root: Path = Path("/")) -> tuple[str, ...]:
    """The bridges above a PCI device and the device itself, host bridge first; empty if sysfs does not know it."""
    try:
        real = (root / "sys/bus/pci/devices" / bus).resolve(strict=True)
    except OSError:
        return ()
    parts = real.parts
    start = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[start:]


def relation(a: str, b: str, root: Path = Path("/")) -> Relation | None:
    """What lies between two PCI devices, in nvidia-smi's words; None if sysfs does not tell."""
    first, second = path_of(a, root), path_of(b, root)
    if not first or not second:
        return None
    shared = next(
        (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(first), len(second))
    )
    if shared == 0:
        numa = [numa_node(root / "sys/bus/pci/devices" / bus) for bus in (a, b)]
        return "NODE" if numa[0] == numa[1] and numa[0] is not None else "SYS"
    # A function of the same card shares everything down to its port; a switch is a port above and a port below.
    bridges = len(first) + len(second) - 2 * shared - 2
    if shared == 1:
        return "PHB"
    return "PIX" if bridges <= 2 else "PXB"
