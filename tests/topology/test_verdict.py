"""The way the gradients go: NCCL's choices on machines whose behaviour is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoddp.topology.facts import Cpu, Gpu, GpuPair, Nic, Node, Relation
from autoddp.topology.rdma.ports import RdmaPort
from autoddp.topology.verdict import between_gpus, between_nodes, verdicts

INTEL, AMD, UNKNOWN = Cpu(vendor="GenuineIntel"), Cpu(vendor="AuthenticAMD"), Cpu()


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
        ("PIX", UNKNOWN, {}, "P2P/PCIe"),
        ("PHB", UNKNOWN, {}, "P2P/PCIe or SHM"),
        ("SYS", Cpu(vendor="HygonGenuine"), {}, "P2P/PCIe or SHM"),
        ("NODE", INTEL, {"NCCL_P2P_LEVEL": "PHB"}, "P2P/PCIe"),
        ("NODE", INTEL, {"NCCL_P2P_LEVEL": "NODE"}, "SHM"),
        ("PIX", INTEL, {"NCCL_P2P_LEVEL": "NVL"}, "SHM"),
        ("SYS", INTEL, {"NCCL_P2P_LEVEL": "SYS"}, "P2P/PCIe"),
        ("SYS", INTEL, {"NCCL_P2P_LEVEL": "sys"}, "SHM"),
        ("PIX", AMD, {"NCCL_P2P_DISABLE": "1"}, "SHM"),
        ("PXB", INTEL, {"NCCL_P2P_LEVEL": "1"}, "SHM"),
        ("PXB", INTEL, {"NCCL_P2P_LEVEL": "2"}, "P2P/PCIe"),
        ("SYS", INTEL, {"NCCL_P2P_LEVEL": "5"}, "P2P/PCIe"),
    ],
)
def test_peer_access_ends_where_nccl_ends_it(
    relation: Relation, cpu: Cpu, environment: dict[str, str], transport: str
) -> None:
    node = two(GpuPair(0, 1, relation, p2p="OK"), cpu)
    assert between_gpus(node, node.pair(0, 1), environment).transport == transport


def test_what_nccl_reads_from_its_files_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = two(GpuPair(0, 1, "PIX", p2p="OK"))
    (tmp_path / "nccl.conf").write_text("NCCL_P2P_DISABLE=1\n")
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    assert verdicts(node)[0].transport == "SHM"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")  # the environment goes before the file
    assert verdicts(node)[0].transport == "P2P/PCIe"


def test_across_sockets_without_peer_access() -> None:
    node = two(GpuPair(0, 1, "SYS", p2p="CNS"), AMD)
    found = between_gpus(node, node.pair(0, 1), {})
    assert (found.transport, found.expected) == ("SHM", "expected 6.3-10.1 GB/s")
    assert found.why == "the chipset does not support peer access; they cross the sockets"
    assert found.holds_back == ""


@pytest.mark.parametrize(
    ("count", "cpu", "nccl", "transport"),
    [
        (2, AMD, "2.27.7", "P2P/PCIe"),
        (8, AMD, "2.27.7", "SHM"),
        (8, AMD, "2.23.4+cuda12.2", "SHM"),  # as a log has it
        (8, AMD, "2.21.5", "P2P/PCIe"),
        (8, AMD, "", "P2P/PCIe or SHM"),
        (8, UNKNOWN, "2.27.7", "SHM"),
        (2, UNKNOWN, "2.27.7", "P2P/PCIe or SHM"),
        (8, INTEL, "", "SHM"),
    ],
)
def test_nccls_default_since_2_23_4(count: int, cpu: Cpu, nccl: str, transport: str) -> None:
    """On AMD it has ended below one CPU since then, unless there are two GPUs: NCCL_P2P_LEVEL=SYS is worth a trial."""
    pair = GpuPair(0, 1, "SYS", p2p="OK")
    gpus = tuple(card(index) for index in range(count))
    node = Node("here", gpus=gpus, pairs=(pair,), cpu=cpu, versions={"nccl": nccl} if nccl else {})
    found = between_gpus(node, pair, {})
    assert found.transport == transport
    assert ("NCCL_P2P_LEVEL=SYS" in found.holds_back) is (transport == "SHM")
    assert ("is not known" in found.why) is ("or" in transport)


@pytest.mark.parametrize(
    ("name", "p2p", "transport"),
    [
        ("NVIDIA GeForce RTX 4090", "", "SHM"),
        ("NVIDIA GeForce RTX 4090", "OK", "P2P/PCIe"),  # there is a driver that allows it
        ("NVIDIA L40S", "", "P2P/PCIe"),
    ],
)
def test_geforce_cards_have_no_peers_unless_the_driver_says_so(name: str, p2p: str, transport: str) -> None:
    node = two(GpuPair(0, 1, "PIX", p2p=p2p))
    node = replace(node, gpus=tuple(replace(gpu, name=name) for gpu in node.gpus))
    assert between_gpus(node, node.pair(0, 1), {}).transport == transport


@pytest.mark.parametrize(
    ("name", "version", "rate"),
    [
        ("NVIDIA B200", None, "at 50 GB/s a link"),
        ("NVIDIA GB300", None, "at 50 GB/s a link"),
        ("NVIDIA H100 80GB HBM3", None, "at 25 GB/s a link"),
        ("NVIDIA H20", None, "at 25 GB/s a link"),
        ("NVIDIA RTX A6000", None, "at 14.0625 GB/s a link"),
        ("NVIDIA GeForce RTX 3090", None, "at 14.0625 GB/s a link"),
        ("NVIDIA A40", None, "at 14.0625 GB/s a link"),
        ("NVIDIA A30", None, "at 25 GB/s a link"),
        ("Tesla P100-SXM2-16GB", None, "at 20 GB/s a link"),
        ("", 5, "at 50 GB/s a link"),
        ("", None, "at 25 GB/s a link, which is assumed: NVLink 5 has 50"),
        ("NVIDIA R100", None, "at 25 GB/s a link, which is assumed: NVLink 5 has 50"),
    ],
)
def test_what_a_link_carries_follows_from_its_version(name: str, version: int | None, rate: str) -> None:
    node = two(GpuPair(0, 1, nvlinks=18, nvlink_version=version))
    node = replace(node, gpus=tuple(replace(gpu, name=name) for gpu in node.gpus))
    assert between_gpus(node, node.pair(0, 1), {}).why == f"18 NVLinks, {rate}"


def test_amds_link_between_gpus() -> None:
    found = between_gpus(two(GpuPair(0, 1, xgmi=True)), GpuPair(0, 1, xgmi=True), {})
    assert (found.transport, found.low) == ("P2P/xGMI", None)


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


def test_a_refusal_is_a_verdict_however_they_are_joined() -> None:
    node = two(GpuPair(0, 1, p2p="CNS"))
    assert between_gpus(node, node.pair(0, 1), {}).transport == "SHM"


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


@pytest.mark.parametrize(("value", "transport"), [("1", "NET/Socket"), ("0", "NET/IB"), ("", "NET/IB")])
def test_who_switches_rdma_off_is_promised_none(value: str, transport: str) -> None:
    """It is also what the settings are chosen by that are tried."""
    found = between_nodes(Node("h", gpus=(card(0),), nics=(SLOW,), rdma=RAILS), {"NCCL_IB_DISABLE": value})
    assert found.transport == transport
    assert ("NCCL_IB_DISABLE is set" in found.holds_back) is (transport == "NET/Socket")


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


def test_whether_a_nic_reads_a_gpus_memory_is_not_guessed() -> None:
    node = Node("", gpus=(card(0),), rdma=RAILS, unknown={"gpudirect": "no file tells it"})
    found = between_nodes(node)
    assert (found.transport, found.holds_back) == ("NET/IB/GDRDMA or NET/IB", "")
    assert found.low == pytest.approx(0.4 * 400)
    assert found.high == pytest.approx(0.97 * 400)
    assert "is not known" in found.why


def test_a_copy_of_sys_does_not_tell_whether_gpus_send() -> None:
    assert between_nodes(Node("", nics=(SLOW,))).transport == "NET/Socket or Gloo/TCP"
    found = between_nodes(Node("", nics=(SLOW,), rdma=RAILS))
    assert (found.transport, found.low) == ("", None)
    assert "GPUs take RDMA over mlx5_0" in found.why


def test_gpus_of_which_nothing_tells_may_send() -> None:
    untold = {"gpus": "no NVIDIA driver", "gpus.0": "/dev/kfd is AMD's"}
    assert between_nodes(Node("h", nics=(SLOW,), unknown=untold)).transport == "NET/Socket or Gloo/TCP"
    found = between_nodes(Node("h", nics=(SLOW,), rdma=RAILS, unknown=untold))
    assert (found.transport, found.low) == ("", None)


def test_a_port_of_unknown_state_does_not_make_it_tcp() -> None:
    found = between_nodes(Node("", gpus=(card(0),), nics=(SLOW,), rdma=(RdmaPort("mlx5_0", 1),)))
    assert (found.transport, found.low) == ("", None)
    assert "mlx5_0 if active, else TCP" in found.why


def test_efa_is_no_roce_and_takes_a_plugin() -> None:
    efa = RdmaPort("rdmap16s27", 1, "ACTIVE", transport="unspecified", rate_gbps=100.0)
    found = between_nodes(Node("h", gpus=(card(0),), nics=(SLOW,), rdma=(efa,)))
    assert (found.transport, found.low) == ("", None)
    assert "rdmap16s27 by a plugin only" in found.why
    assert between_nodes(Node("h", nics=(SLOW,), rdma=(efa,))).transport == "Gloo/TCP"


def test_a_fabric_that_nobody_names_is_not_called_roce() -> None:
    unnamed = replace(RAILS[0], link_layer=None)
    assert between_nodes(Node("h", gpus=(card(0),), rdma=(unnamed,), gpudirect="dma-buf")).why.startswith("RDMA over")


def test_a_verdict_tells_how_many_ports_it_is_of() -> None:
    for direct in ("dma-buf", None):
        assert between_nodes(Node("h", gpus=(card(0),), rdma=RAILS, gpudirect=direct)).ports == 8
    assert between_nodes(Node("h", gpus=(card(0),), rdma=RAILS, unknown={"gpudirect": "no file tells it"})).ports == 8
    assert between_nodes(Node("h", nics=(SLOW,))).ports == 1
