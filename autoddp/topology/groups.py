"""GPUs that belong together."""

from __future__ import annotations

from collections.abc import Iterable

from autoddp.topology.facts import Gpu, Node


def switches(node: Node, gpus: Iterable[Gpu]) -> list[list[Gpu]]:
    """`gpus` grouped by PCIe switch: each group is a set of GPUs of which every two are known to share one.

    A GPU of which nothing is known, or that is joined by NVLink (which hides the PCIe relation in nvidia-smi's matrix),
    stands alone.
    """
    groups: list[list[Gpu]] = []
    for gpu in gpus:
        for group in groups:
            if all(node.pair(gpu.index, other.index).relation == "PIX" for other in group):
                group.append(gpu)
                break
        else:
            groups.append([gpu])
    return groups
