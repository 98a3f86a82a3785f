"""The checklist of published guides: each point says what was found and what to do, or why it was not looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddp.topology import Gpu, Node, RdmaPort
from autoddp.topology.checklist import Point, checklist
from autoddp.topology.facts import Limits
from autoddp.topology.rdma.ports import Gid

ALL = [
    "NCCL",
    "graph inputs",
    "control flow",
    "RDMA ports",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_DISABLE",
    "NCCL_IB_TIMEOUT",
    "NCCL_NET_GDR_LEVEL",
    "peer memory",
    "memlock",
    "NCCL_ALGO",
    "the gain",
]
PORTS = tuple(RdmaPort(f"mlx5_{n}", 1, "ACTIVE", link_layer="InfiniBand", rate_gbps=400.0) for n in range(2))
GOOD = Node(
    "gpu01",
    gpus=(Gpu(0), Gpu(1)),
    rdma=PORTS,
    gpudirect="nvidia_peermem",
    limits=Limits(memlock_bytes=-1),
    versions={"torch": "2.13.0", "nccl": "2.29.7"},
)
ON_ETHERNET = tuple(replace(port, link_layer="Ethernet") for port in PORTS)
ROUTABLE = tuple(
    Gid(port.device, 1, 3, f"0000:0000:0000:0000:0000:ffff:0a00:000{n + 1}", "v2", f"eth{n}")
    for n, port in enumerate(PORTS)
)


def points(node: Node, environment: dict[str, str] | None) -> dict[str, Point]:
    return {point.what: point for point in checklist(node, environment)}


def test_a_good_node_has_nothing_to_mend() -> None:
    found = points(GOOD, {})
    assert list(found) == ALL
    assert {what for what, point in found.items() if point.state == "not looked at"} == {ALL[1], ALL[2], ALL[-1]}
    assert all(point.state in ("good", "not looked at") for point in found.values())
    assert "mlx5_0:1 InfiniBand 400 Gbit/s ACTIVE" in found["RDMA ports"].found


MENDS = {
    "no NCCL": (replace(GOOD, versions={"torch": "2.13.0+cpu"}), {}, "NCCL", "made for CUDA"),
    "a port down": (
        replace(GOOD, rdma=(PORTS[0], replace(PORTS[1], state="DOWN"))),
        {},
        "RDMA ports",
        "ibstat",
    ),
    "a device that is not there": (GOOD, {"NCCL_IB_HCA": "=mlx5_7"}, "NCCL_IB_HCA", "mlx5_7"),
    "no routable address chosen": (
        replace(GOOD, rdma=ON_ETHERNET, gids=ROUTABLE),
        {},
        "NCCL_IB_GID_INDEX",
        "set NCCL_IB_GID_INDEX=3",
    ),
    "another address": (
        replace(GOOD, rdma=ON_ETHERNET, gids=ROUTABLE),
        {"NCCL_IB_GID_INDEX": "0"},
        "NCCL_IB_GID_INDEX",
        "set NCCL_IB_GID_INDEX=3",
    ),
    "switched off": (GOOD, {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE", "unset NCCL_IB_DISABLE"),
    "no peer memory": (replace(GOOD, gpudirect=None), {}, "peer memory", "nvidia_peermem"),
    "little memory to pin": (
        replace(GOOD, limits=Limits(memlock_bytes=65536)),
        {},
        "memlock",
        "ulimit -l unlimited",
    ),
}


@pytest.mark.parametrize("name", MENDS)
def test_what_is_wrong_is_to_be_mended_and_nothing_else(name: str) -> None:
    node, environment, what, do = MENDS[name]
    found = points(node, environment)
    assert [point.what for point in found.values() if point.state == "mend"] == [what]
    assert do in found[what].do


@pytest.mark.parametrize("torch", ["2.6.0a0+ecf3bae40a.nv25.01", "2.7.0+cu128"])
def test_an_nccl_that_is_no_package_is_not_denied(torch: str) -> None:
    """NVIDIA's containers have it as a library of the system, and torch's builds for Grace had it in themselves."""
    found = points(replace(GOOD, versions={"torch": torch}), {})["NCCL"]
    assert (found.state, torch in found.found) == ("not looked at", True)
    assert "torch.cuda.nccl.version()" in found.do


def test_the_right_address_is_good() -> None:
    node = replace(GOOD, rdma=ON_ETHERNET, gids=ROUTABLE)
    assert points(node, {"NCCL_IB_GID_INDEX": "3"})["NCCL_IB_GID_INDEX"].state == "good"


def test_values_that_somebody_has_set_are_to_be_measured() -> None:
    found = points(GOOD, {"NCCL_IB_TIMEOUT": "22", "NCCL_NET_GDR_LEVEL": "SYS", "NCCL_ALGO": "Tree"})
    assert [found[name].found for name in ("NCCL_IB_TIMEOUT", "NCCL_NET_GDR_LEVEL", "NCCL_ALGO")] == [
        "22",
        "SYS",
        "Tree",
    ]
    assert all("autoddp bench" in found[name].do for name in ("NCCL_IB_TIMEOUT", "NCCL_NET_GDR_LEVEL", "NCCL_ALGO"))


def test_without_gpu_and_rdma_each_point_says_why_it_does_not_matter() -> None:
    found = points(Node("vm", limits=Limits(memlock_bytes=65536), unknown={"gpus": "no NVIDIA driver"}), {})
    assert list(found) == ALL
    assert [point.what for point in found.values() if point.state == "mend"] == []
    assert "no NVIDIA driver" in found["NCCL"].found
    assert found["memlock"] == Point(
        "memlock", "not needed", "64.0 KiB; there is no RDMA device", found["memlock"].expected
    )


def test_gpus_of_which_nothing_tells_are_not_denied() -> None:
    found = points(Node("h", unknown={"gpus": "no NVIDIA driver", "gpus.0": "/dev/kfd is AMD's"}), {})
    assert (found["NCCL"].state, found["NCCL"].found) == ("not looked at", "/dev/kfd is AMD's")
    assert not any("no GPU here" in point.found for point in found.values())


def test_another_machines_files_do_not_tell_its_jobs_variables() -> None:
    node = replace(GOOD, limits=Limits(), versions={}, rdma=(RdmaPort("mlx5_0", 1),))
    found = points(node, None)
    names = ("NCCL", "RDMA ports", "NCCL_IB_HCA", "NCCL_ALGO", "memlock")
    assert {found[name].state for name in names} == {"not looked at"}
    assert all(point.found for point in found.values())


def test_what_files_do_not_tell_is_not_to_be_mended() -> None:
    node = replace(GOOD, host="", gpudirect=None, unknown={"gpudirect": "no file tells it"})
    assert points(node, None)["peer memory"] == Point(
        "peer memory", "not looked at", "no file tells it", points(GOOD, {})["peer memory"].expected
    )
    found = points(replace(node, gpus=(), versions={}), None)
    assert {found[name].state for name in ("NCCL", "peer memory")} == {"not looked at"}
