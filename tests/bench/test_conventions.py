"""nccl-tests' bandwidths, the sizes, and who reduces with whom."""

from __future__ import annotations

import pytest

from autoddp.bench import algbw, busbw, layouts, sizes
from autoddp.units import byte_count


@pytest.mark.parametrize(
    ("size", "micro", "ranks", "alg", "bus"),
    [
        # worked out by hand: bytes over time, then 1, 1.5, 1.75 and 1.875 times that
        (2**27, 1024.0, 2, 131.07, 131.07),
        (10**9, 1e6, 4, 1.0, 1.5),
        (10**9, 1e6, 8, 1.0, 1.75),
        (1024, 1024.0, 16, 0.001, 0.001875),
    ],
)
def test_bandwidths(size: int, micro: float, ranks: int, alg: float, bus: float) -> None:
    assert algbw(size, micro * 1e-6) == pytest.approx(alg, rel=1e-4)
    assert busbw(size, micro * 1e-6, ranks) == pytest.approx(bus, rel=1e-4)


def test_a_full_duplex_link_is_seen_at_its_rate() -> None:
    """A ring over links of 1 GB/s each way: every rank sends 2(n - 1)/n of the message."""
    for ranks in (2, 3, 8, 100):
        seconds = 10**8 * 2 * (ranks - 1) / ranks / 1e9
        assert busbw(10**8, seconds, ranks) == pytest.approx(1.0)


def test_sizes() -> None:
    assert sizes(2**30)[0] == 1024
    assert sizes(2**30)[-1] == 2**30
    assert len(sizes(2**30)) == 21
    assert sizes(2**20, 4) == [2**10, 2**12, 2**14, 2**16, 2**18, 2**20]
    assert sizes(1024) == [1024]
    for largest, factor in ((1023, 2), (2**20, 1)):
        with pytest.raises(ValueError, match="no sizes"):
            sizes(largest, factor)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([[0]], {}),
        ([[0, 1]], {"within": [[0, 1]]}),
        ([[0], [1], [2]], {"between": [[0, 1, 2]]}),
        ([[0, 1], [2]], {"within": [[0, 1]], "between": [[0, 2]], "all": [[0, 1, 2]]}),
        # ranks need not lie node by node
        ([[0, 2], [1, 3]], {"within": [[0, 2], [1, 3]], "between": [[0, 1]], "all": [[0, 1, 2, 3]]}),
    ],
)
def test_layouts(nodes: list[list[int]], expected: dict[str, list[list[int]]]) -> None:
    assert layouts(nodes) == expected


@pytest.mark.parametrize(("text", "count"), [("1024", 1024), ("64k", 65536), ("1MiB", 2**20), ("2 GB", 2**31)])
def test_byte_count(text: str, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "1.5M", "-1K", "1P", "64 M iB"])
def test_no_byte_count(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        byte_count(text)
