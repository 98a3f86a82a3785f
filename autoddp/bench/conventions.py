"""The conventions of nccl-tests: bandwidths in decimal GB/s, sizes in bytes per rank; and who reduces with whom."""

from __future__ import annotations

from collections.abc import Sequence

SMALLEST = 1024  # bytes; a smaller all-reduce takes as long


def algbw(size: int, seconds: float) -> float:
    """GB/s of an all-reduce of `size` bytes per rank, as the script sees it.

    >>> algbw(1_000_000, 1e-3)
    1.0
    """
    return size / seconds / 1e9


def busbw(size: int, seconds: float, ranks: int) -> float:
    """GB/s each way on each rank's link: an all-reduce moves 2(n - 1)/n of its size. To compare with the link.

    >>> busbw(1_000_000, 1e-3, 2), busbw(1_000_000, 1e-3, 8)
    (1.0, 1.75)
    """
    return algbw(size, seconds) * 2 * (ranks - 1) / ranks


def sizes(largest: int, factor: int = 2) -> list[int]:
    """Bytes per rank, from 1 KiB up to `largest`, each `factor` times the one before. ValueError if there are none.

    >>> sizes(10_000)
    [1024, 2048, 4096, 8192]
    """
    if largest < SMALLEST or factor < 2:
        raise ValueError(f"no sizes from {SMALLEST} to {largest} bytes by factors of {factor}")
    found = [SMALLEST]
    while found[-1] * factor <= largest:
        found.append(found[-1] * factor)
    return found


def layouts(nodes: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
    """Layout → groups of ranks that reduce at the same time; `nodes` lists each node's ranks. Empty for one rank.

    `within`: every node by itself. `between`: the first rank of every node. `all`: all ranks, where that is neither.

    >>> layouts([[0, 1], [2, 3]])
    {'within': [[0, 1], [2, 3]], 'between': [[0, 2]], 'all': [[0, 1, 2, 3]]}
    >>> layouts([[0], [1]])
    {'between': [[0, 1]]}
    """
    found = {}
    several = [list(node) for node in nodes if len(node) > 1]
    if several:
        found["within"] = several
    if len(nodes) > 1:
        found["between"] = [[node[0] for node in nodes]]
    if several and len(nodes) > 1:
        found["all"] = [sorted(rank for node in nodes for rank in node)]
    return found
