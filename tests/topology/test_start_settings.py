"""Start-up settings are offered where the topology gives a reason, and nowhere else."""

from __future__ import annotations

import pytest

from autoddp.topology.facts import Cpu, Gpu, GpuPair, Nic, Node
from autoddp.topology.start_settings import nccl_settings

SOCKETS = {"nccl_socket_threads": 4, "nccl_sockets_per_thread": 4}
PEERS = {"nccl_p2p_level": "SYS"}


def node(speed: int = 100_000, relation: str = "PIX", p2p: str = "OK", vendor: str = "GenuineIntel") -> Node:
    return Node(
        "here",
        gpus=(Gpu(0), Gpu(1)),
        pairs=(GpuPair(0, 1, relation, p2p=p2p),),
        nics=(Nic("eth0", up=True, speed_mbit=speed),),
        cpu=Cpu(vendor=vendor),
    )


@pytest.mark.parametrize(
    ("here", "nodes", "environment", "expected"),
    [
        (node(), 2, {}, [SOCKETS]),
        (node(), 1, {}, []),
        (node(speed=10_000), 2, {}, []),
        (node(), 2, {"NCCL_SOCKET_NTHREADS": "2"}, []),
        (node(relation="SYS"), 1, {}, [PEERS]),
        (node(relation="SYS"), 2, {}, [SOCKETS, PEERS]),
        (node(relation="SYS", vendor="AuthenticAMD"), 1, {}, []),
        (node(relation="SYS", p2p="CNS"), 1, {}, []),
        (node(relation="SYS"), 1, {"NCCL_P2P_LEVEL": "PXB"}, []),
    ],
)
def test_what_is_offered(
    here: Node, nodes: int, environment: dict[str, str], expected: list[dict[str, object]]
) -> None:
    assert nccl_settings(here, nodes, environment) == expected
