"""The way the gradients go: NCCL's choices on machines whose behaviour is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddp.topology.facts import Cpu, Gpu, GpuPair, Nic, Node, Relation
from autoddp.topology.rdma import RdmaPort
from autoddp.topology.verdict import between_gpus, between_nodes, verdicts

INTEL, AMD = Cpu(vendor="GenuineIntel"), Cpu(vendor="AuthenticAMD")


def card(index: int, generation: int = 4, width: int = 16) -> Gpu:
    return Gpu(index, pcie_generation_max=generation, pcie_width=width, pcie_width_max=16)


def two(pair: GpuPair, cpu: Cpu = INTEL, **cards: int) -> Node:
    return Node("here", gpus=(card(0), card(1, **cards)), pairs=(pair,), cpu=cpu)


def test_nvlink_carries_what_its_links_carry() -> None:
    node = two(GpuPair(0, 1, "SYS", nvlinks=12, nvlink_gbs=300.0, p2p="OK"))
    found = between_gpus(node, node.pair(1, 0), {})
    assert found.transport == "P2P/NVLink"
    assert found.low is not None
    assert found.high is not None
    assert 200 < found.low < 240 < found.high < 300  # 8 A100 reach 230 to 240 GB/s
    assert "12 NVLinks" in found.why


@pytest.mark.parametrize(
    ("relation", "cpu", "environment", "transport"),
    [
        ("PIX", INTEL, {}, "P2P/PCIe"),
        ("PXB", INTEL, {}, "P2P/PCIe"),
        ("PHB", INTEL, {}, "SHM"),
        ("SYS", INTEL, {}, "SHM"),
        ("PHB", AMD, {}, "P2P/PCIe"),
        ("SYS", AMD, {}, "P2P/PCIe"),
        ("SYS", INTEL, {"NCCL_P2P_LEVEL": "SYS"}, "P2P/PCIe"),
        ("PIX", AMD, {"NCCL_P2P_DISABLE": "1"}, "SHM"),
    ],
)
def test_peer_access_ends_where_nccl_ends_it(
    relation: Relation, cpu: Cpu, environment: dict[str, str], transport: str
) -> None:
    node = two(GpuPair(0, 1, relation, p2p="OK"), cpu)
    assert between_gpus(node, node.pair(0, 1), environment).transport == transport


def test_across_sockets_without_peer_access() -> None:
    node = two(GpuPair(0, 1, "SYS", p2p="CNS"), AMD)
    found = between_gpus(node, node.pair(0, 1), {})
    assert (found.transport, found.expected) == ("SHM", "expected 6.3-10.1 GB/s")
    assert "cross the sockets" in found.why
    assert "chipset" in found.why
    assert "NVLink" in found.holds_back


def test_a_narrow_slot_is_named_and_counts() -> None:
    node = two(GpuPair(0, 1, "PIX", p2p="OK"), width=4)
    found = between_gpus(node, node.pair(0, 1), {})
    assert found.high is not None
    assert found.high < 4 * 1.969
    assert found.holds_back == "GPU1 runs on 4 of 16 PCIe lanes: look at its slot or riser"


def test_nothing_known_is_no_verdict() -> None:
    node = Node("here", gpus=(Gpu(0), Gpu(1)))
    found = between_gpus(node, node.pair(0, 1), {})
    assert (found.transport, found.low, found.high) == ("", None, None)


def test_mig_has_no_peers() -> None:
    node = two(GpuPair(0, 1, "PIX", nvlinks=12, nvlink_gbs=300.0, p2p="OK"))
    node = replace(node, gpus=(node.gpus[0], replace(node.gpus[1], mig=True)))
    assert between_gpus(node, node.pair(0, 1), {}).transport == "SHM"


def test_one_verdict_a_pair_and_one_for_the_way_out() -> None:
    node = Node("here", gpus=tuple(card(i) for i in range(4)))
    found = [verdict.between for verdict in verdicts(node, {})]
    assert found == ["GPU0-GPU1", "GPU0-GPU2", "GPU0-GPU3", "GPU1-GPU2", "GPU1-GPU3", "GPU2-GPU3", "nodes"]


RAILS = tuple(RdmaPort(f"mlx5_{i}", 1, state="ACTIVE", link_layer="InfiniBand", rate_gbps=400.0) for i in range(8))
SLOW = Nic("eth0", up=True, speed_mbit=10_000, routed=True)
FAST = Nic("eth1", up=True, speed_mbit=100_000)


@pytest.mark.parametrize(
    ("node", "transport", "low", "high"),
    [
        (Node("h", gpus=(card(0),), rdma=RAILS, gpudirect="dma-buf"), "NET/IB/GDRDMA", 320, 400),
        (Node("h", gpus=(card(0),), rdma=RAILS), "NET/IB", 100, 300),
        (Node("h", gpus=(card(0),), nics=(SLOW,)), "NET/Socket", 0.6, 1.25),
        (Node("h", nics=(SLOW,)), "Gloo/TCP", 0.6, 1.25),
    ],
)
def test_between_nodes(node: Node, transport: str, low: float, high: float) -> None:
    found = between_nodes(node)
    assert found.transport == transport
    assert found.low is not None
    assert found.high is not None
    assert low <= found.low < found.high <= high


def test_an_idle_rdma_device_is_what_holds_it_back() -> None:
    down = replace(RAILS[0], state="DOWN")
    found = between_nodes(Node("h", gpus=(card(0),), nics=(SLOW,), rdma=(down,)))
    assert found.transport == "NET/Socket"
    assert "not active" in found.holds_back


def test_no_interface_is_up() -> None:
    found = between_nodes(Node("h", nics=(replace(SLOW, up=False),)))
    assert (found.low, found.why) == (None, "no interface is up")


@pytest.mark.parametrize(("lost", "told"), [(None, False), (0, False), (1, False), (2, True), (40, True)])
def test_a_link_that_comes_and_goes_is_told_with_what_outlasts_it(lost: int | None, told: bool) -> None:
    rails = (replace(RAILS[0], link_downed=lost), RAILS[1])
    verdict = between_nodes(Node("here", gpus=(Gpu(0),), rdma=rails, gpudirect="dma-buf"))
    assert ("NCCL_IB_TIMEOUT=22" in verdict.holds_back) is told
    assert ("NCCL_IB_RETRY_CNT=7" in verdict.holds_back) is told
    assert verdict.holds_back.startswith(f"mlx5_0 has lost its link {lost} times") is told
