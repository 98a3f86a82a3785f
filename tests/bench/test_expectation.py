"""Measured against expected, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddp.bench import BenchResult, LinkFacts, Point, Sweep
from autoddp.bench.expectation import judge
from autoddp.topology import Verdict

TCP = Verdict("nodes", "Gloo/TCP", 0.6, 1.2, "TCP over eth0 of 10 Gbit/s")
NVLINK = Verdict("GPU0-GPU1", "P2P/NVLink", 210.0, 285.0, "12 NVLinks, 300 GB/s each way")
SOCKETS = Verdict("GPU0-GPU4", "SHM", 6.3, 10.1, "they cross the sockets", "no NVLink between them")
UNKNOWN = Verdict("nodes", "Gloo/TCP", None, None, "TCP over eth0 of unknown speed")


def result(layout: str, gbs: float, backend: str = "nccl") -> BenchResult:
    """Two ranks, for which bus and algorithm bandwidth are one."""
    point = Point(10**8, 0.1 / gbs, 0.1 / gbs, 0.1 / gbs, 5)
    return BenchResult(LinkFacts(2, 2, backend, ("cpu",), "2.13.0"), (Sweep(layout, 2, (point,)),), (), {})


@pytest.mark.parametrize(
    ("layout", "gbs", "verdicts", "expected"),
    [
        ("between", 1.1, [NVLINK, TCP], ["between: 1.1 GB/s measured at best", "as it should be"]),
        ("between", 0.025, [NVLINK, TCP], ["too slow; look for another job on the link, a link shaped below"]),
        (
            "within",
            8.0,
            [NVLINK, SOCKETS, TCP],
            ["expected 6.3-10.1 GB/s (SHM, they cross the sockets)", "as it should"],
        ),
        ("within", 3.0, [NVLINK, SOCKETS], ["too slow; look for no NVLink between them; memory of another NUMA node"]),
    ],
)
def test_what_is_said(layout: str, gbs: float, verdicts: list[Verdict], expected: list[str]) -> None:
    (line,) = judge(result(layout, gbs), verdicts)
    assert all(part in line for part in expected)


@pytest.mark.parametrize(("layout", "verdicts"), [("between", [UNKNOWN]), ("within", [TCP]), ("all", [TCP, NVLINK])])
def test_nothing_is_said_of_what_nothing_is_expected_of(layout: str, verdicts: list[Verdict]) -> None:
    assert judge(result(layout, 1.0), verdicts) == []


def test_gloo_is_not_held_against_nccls_ways() -> None:
    assert judge(result("within", 1.0, "gloo"), [NVLINK, SOCKETS]) == []
    assert len(judge(result("between", 1.0, "gloo"), [NVLINK, TCP])) == 1


def test_one_rank_alone_need_not_fill_all_ports_of_its_node() -> None:
    """Eight ports of 400 Gbit/s, and one rank of each node: its GPU has one of them."""
    rails = Verdict("nodes", "NET/IB/GDRDMA", 320.0, 388.0, "InfiniBand over mlx5_0, mlx5_1, …", ports=8)
    (line,) = judge(result("between", 47.0), [NVLINK, rails])
    assert "expected 40-388 GB/s" in line
    assert line.endswith("as it should be")
    (line,) = judge(result("between", 20.0), [NVLINK, rails])
    assert "too slow; look for a NIC far from its GPU" in line


def test_small_messages_tell_nothing_of_a_rate() -> None:
    """As under --max-size 1M: an all-reduce of 1 MiB over NVLink takes hardly longer than one of 1 KiB."""
    points = tuple(Point(size, took, took, took, 5) for size, took in ((1024, 20e-6), (2**20, 30e-6)))
    (line,) = judge(replace(result("within", 1.0), sweeps=(Sweep("within", 2, points),)), [NVLINK])
    assert "1.0 MiB is too small to tell" in line
    assert "too slow" not in line
