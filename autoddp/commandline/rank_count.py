"""How many ranks this host starts where neither --nproc-per-node nor PET_NPROC_PER_NODE says it.

torchrun starts one, and so does autoddp where it is torchrun (--trials 0). Where it tunes or uses a recipe, one rank is
nothing to tune, and it starts one per visible GPU, or per NUMA node on a host without GPUs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence

from autoddp.commandline.local_fingerprint import visible_gpus
from autoddp.topology import NumaNode, cpus, numa_nodes

_FEWEST_WITHOUT_GPUS = 2  # ranks on one NUMA node: with a single one there would be no reduction to tune
_ANOTHER = "--nproc-per-node sets another number"


def set_ranks(torchrun: argparse.Namespace) -> str:
    """Set the number of ranks with which this host is tuned or uses a recipe; the line that says so."""
    gpus = visible_gpus()
    # macOS has no affinity, and lists no NUMA nodes either.
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    nodes = 0 if gpus else usable_nodes(numa_nodes(), allowed)
    count = gpus or max(nodes, _FEWEST_WITHOUT_GPUS)
    torchrun.nproc_per_node = str(count)
    if gpus:
        why = "one per visible GPU"
    else:
        why = "one per NUMA node" if nodes == count else f"which has no GPU and {nodes or 'no known'} NUMA node"
    return f"{count} rank{'s' if count > 1 else ''} on this host, {why}; {_ANOTHER}"


def set_one(torchrun: argparse.Namespace, is_known: bool = True) -> str:
    """Set torchrun's number, for a script of which nobody knows that it shares its work among ranks.

    `is_known`: it has ended without a DDP model. Else tuning ended before it could have built one.
    """
    tuned_with, torchrun.nproc_per_node = torchrun.nproc_per_node, "1"
    if is_known or tuned_with == "1":
        return f"launching 1 rank, as torchrun does: no DistributedDataParallel model was seen; {_ANOTHER}"
    why = "tuning ended before the script could build a DistributedDataParallel model"
    return f"launching 1 rank, as torchrun does: {why}; if it builds one, start it with --nproc-per-node {tuned_with}"


def one_rank() -> str:
    """A line about torchrun's number, which stays for a script that was never tuned."""
    why = "the recipe does not say that it was made for this script, which may not use DistributedDataParallel"
    return f"1 rank on this host, as under torchrun: {why}; {_ANOTHER}"


def idle_gpus() -> str:
    """A line about GPUs that torchrun's single rank leaves without work; "" if it leaves none."""
    gpus = visible_gpus()
    return f"1 rank, as under torchrun, on a host with {gpus} visible GPUs; {_ANOTHER}" if gpus > 1 else ""


def usable_nodes(nodes: Sequence[NumaNode], allowed: Collection[int]) -> int:
    """NUMA nodes on which this process may run, `allowed` being the numbers of its CPUs."""
    return sum(1 for node in nodes if cpus(node) & set(allowed))
