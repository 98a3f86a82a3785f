"""What NCCL used beside what was predicted: real logs on machines that are, and are not, what the log comes from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nccl_captures import TEXTS

from autoddp.topology.facts import Cpu, Gpu, GpuPair, Nic, Node, Relation
from autoddp.topology.nccl.transports import findings, ways
from autoddp.topology.nccl_log import read_nccl_log
from autoddp.topology.rdma.ports import RdmaPort

PORT = RdmaPort("mlx5_0", 1, state="ACTIVE", link_layer="InfiniBand", rate_gbps=200.0)
ETHERNET = Nic("eth0", up=True, speed_mbit=10_000)
SETTINGS = "look at NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, and whether each process sees all GPUs"


@pytest.fixture(autouse=True)
def nothing_is_asked_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction follows the environment, as NCCL does."""
    for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        monkeypatch.delenv(name, raising=False)


def gpus(*buses: str, relation: Relation = "SYS", nvlinks: tuple[tuple[int, int], ...] = ()) -> Node:
    """GPUs on an Intel machine, all pairs as far apart as `relation`, some joined by NVLinks."""
    numbers = range(len(buses))
    pairs = [GpuPair(a, b, relation, 4 * ((a, b) in nvlinks)) for a in numbers for b in numbers if a < b]
    cards = tuple(Gpu(number, bus=bus) for number, bus in enumerate(buses))
    return Node("here", cards, tuple(pairs), cpu=Cpu(vendor="GenuineIntel"), nics=(ETHERNET,))


def found(name: str, node: Node) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Between → predicted and used."""
    return {way.between: (way.predicted, way.used) for way in ways(node, read_nccl_log(TEXTS[name]))}


def test_pairs_that_are_joined_and_pairs_that_are_not() -> None:
    """Four A100 with NVLink bridges on two pairs: the log says P2P for these, and SHM around."""
    name, node = "a100_pcie_nvlink_pairs_mixed_shm_p2p", gpus(*[""] * 4, nvlinks=((0, 1), (2, 3)))
    assert found(name, node) == {
        "GPU0-GPU1": ("P2P/NVLink", ("P2P",)),
        "GPU0-GPU3": ("SHM", ("SHM",)),
        "GPU1-GPU2": ("SHM", ("SHM",)),
        "GPU2-GPU3": ("P2P/NVLink", ("P2P",)),
    }
    assert findings(node, read_nccl_log(TEXTS[name])) == []


def test_what_differs_is_said_with_both_and_what_to_look_at() -> None:
    """The same log, from a machine where all pairs have NVLinks; and where none has."""
    log = read_nccl_log(TEXTS["a100_pcie_nvlink_pairs_mixed_shm_p2p"])
    all_joined = gpus(*[""] * 4, nvlinks=tuple((a, b) for a in range(4) for b in range(4) if a < b))
    expected = f"NCCL used SHM between GPU0-GPU3, GPU1-GPU2, and P2P/NVLink was predicted: {SETTINGS}"
    assert findings(all_joined, log) == [expected]
    none_joined = findings(gpus(*[""] * 4), log)
    assert none_joined == [
        "NCCL used P2P between GPU0-GPU1, GPU2-GPU3, and SHM was predicted: it is better than predicted"
    ]


def test_many_pairs_are_counted() -> None:
    near = gpus(*[""] * 8, relation="PIX")
    log = read_nccl_log(
        "".join(
            f"h:1:2 [{a}] NCCL INFO Channel 00 : {a}[{a}] -> {a + 1}[{a + 1}] via SHM/direct/direct\n" for a in range(7)
        )
    )
    (said,) = findings(near, log)
    assert said.startswith(
        "NCCL used SHM between GPU0-GPU1, GPU1-GPU2, GPU2-GPU3 and 4 more, and P2P/PCIe was predicted"
    )


@pytest.mark.parametrize(
    ("name", "node", "used"),
    [
        ("rtx3090_nvlink_2.15.5_direct_pointer", gpus("0000:01:00.0", "0000:09:00.0"), {"GPU0-GPU1": ("P2P",)}),
        ("rtx3090_nvlink_2.15.5_direct_pointer", gpus("0000:02:00.0", "0000:09:00.0"), {}),
        ("alibaba_4gpu_cumem_rank_dev_differ", gpus(*[""] * 3), {"GPU1-GPU2": ("P2P",)}),
        ("v100_64ranks_2.4_ring_net_socket", gpus(*[""] * 8), {"nodes": ("NET/Socket",)}),
    ],
    ids=["by address", "another address", "not by rank", "no GPU named"],
)
def test_gpus_are_those_that_nccl_names(name: str, node: Node, used: dict[str, tuple[str, ...]]) -> None:
    """By PCI address or number, and never by the rank; a GPU that is not known here is left out."""
    assert {between: seen for between, (_, seen) in found(name, node).items() if seen} == used


@pytest.mark.parametrize(
    ("name", "gpudirect", "rdma", "says"),
    [
        (
            "2nodes_8gpu_shm_and_socket",
            "nvidia_peermem",
            (PORT,),
            "NCCL used NET/Socket between nodes, and NET/IB/GDRDMA was predicted because mlx5_0 is active: look at "
            "NCCL_IB_DISABLE, NCCL_IB_HCA, the GID index, and whether the container sees /dev/infiniband",
        ),
        ("2nodes_8gpu_shm_and_socket", None, (), ""),
        (
            "v100_2nodes_ib_gdr_no_module",
            "dma-buf",
            (PORT,),
            "NCCL used NET/IB between nodes, and NET/IB/GDRDMA was predicted because dma-buf is there: look at "
            "NCCL_NET_GDR_LEVEL",
        ),
        ("v100_2nodes_ib_gdr_no_module", None, (PORT,), ""),
        ("p4d_4pods_2.27.3_libfabric_gdrdma", None, (PORT,), ""),
    ],
    ids=["sockets", "sockets alone", "through memory", "no GPUDirect", "a plugin's network"],
)
def test_the_way_to_other_nodes(name: str, gpudirect: str | None, rdma: tuple[RdmaPort, ...], says: str) -> None:
    node = replace(gpus(""), gpudirect=gpudirect, rdma=rdma)
    assert "nodes" in found(name, node)
    about_nodes = [finding for finding in findings(node, read_nccl_log(TEXTS[name])) if "between nodes" in finding]
    assert about_nodes == ([says] if says else [])


def test_warnings_are_counted() -> None:
    log = read_nccl_log(TEXTS["2.4.8_no_route_to_host"])
    assert log.warn_lines
    assert findings(gpus(""), log) == [f"NCCL warned {log.warn_lines} times: see its log"]
