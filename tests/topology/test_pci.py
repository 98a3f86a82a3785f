"""Nearness by sysfs paths, on a small tree laid out as the kernel does: devices under bridges, and links to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoddp.topology.facts import nearest
from autoddp.topology.system.pci import path_of, relation

SWITCH = "pci0000:16/0000:16:01.0/0000:17:00.0"
DEVICES = {
    f"{SWITCH}/0000:18:00.0/0000:19:00.0": 0,  # below one switch
    f"{SWITCH}/0000:18:01.0/0000:1a:00.0": 0,
    f"{SWITCH}/0000:18:02.0/0000:1b:00.0/0000:1c:00.0/0000:1d:00.0": 0,  # one switch further
    "pci0000:16/0000:16:03.0/0000:30:00.0": 0,  # another root port of the host bridge
    "pci0000:16/0000:16:03.0/0000:30:00.1": 0,  # the same card
    "pci0000:40/0000:40:01.0/0000:41:00.0": 0,  # another host bridge of the NUMA node
    "pci0000:c0/0000:c0:01.0/0000:c1:00.0": 1,  # the other socket
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    bus = tmp_path / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    for path, numa in DEVICES.items():
        device = tmp_path / "sys/devices" / path
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
        (bus / device.name).symlink_to(device)
    return tmp_path


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("0000:1a:00.0", "PIX"),
        ("0000:1d:00.0", "PXB"),
        ("0000:30:00.0", "PHB"),
        ("0000:41:00.0", "NODE"),
        ("0000:c1:00.0", "SYS"),
        ("0000:ff:00.0", None),
    ],
)
def test_relation_to_a_gpu_below_a_switch(root: Path, other: str, expected: str | None) -> None:
    assert relation("0000:19:00.0", other, root) == expected
    assert relation(other, "0000:19:00.0", root) == expected


def test_two_functions_of_one_card(root: Path) -> None:
    assert relation("0000:30:00.0", "0000:30:00.1", root) == "PIX"


def test_nearest(root: Path) -> None:
    gpus = {0: "0000:1a:00.0", 1: "0000:1d:00.0", 2: "0000:19:00.0", 3: "0000:c1:00.0", 4: "0000:fe:00.0"}

    def to(device: str, *without: int) -> tuple[int, ...]:
        return nearest({gpu: relation(device, bus, root) for gpu, bus in gpus.items() if gpu not in without})

    assert to("0000:19:00.0", 2) == (0,)
    assert to("0000:30:00.1") == (0, 1, 2)
    assert to("0000:ff:00.0") == ()


def test_a_device_sysfs_does_not_know(root: Path) -> None:
    assert path_of("0000:ff:00.0", root) == ()
    assert path_of("../../../../etc", root) == ()
