"""What a diagnosis says in words: the fix of each cause in the user's own terms, scaling, the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.findings import Finding, Level, Scaling
from autoddp.diagnose.suspicions import Surroundings, Suspicion
from autoddp.units import milliseconds
from autoddp.wire import JobFacts

IN_SOME_STEPS = ("rank0_work", "epoch_start", "periodic_stall")
"""Causes that are at work in some steps only."""
_AS_WELL = 1.1  # times what one rank gives: no more than that is not worth several
_LOADING = "DataLoader(num_workers={workers}, persistent_workers=True)"


def fix(suspicion: Suspicion, around: Surroundings, cores: int) -> str:
    """What to change."""
    return _FIXES[suspicion.cause](suspicion, around, cores)


def _fix_loader(suspicion: Suspicion, around: Surroundings, cores: int) -> str:
    everyone = len(suspicion.ranks) == around.job.world_size
    more = _LOADING.format(workers=max(2, min(8, cores)))
    if everyone:
        return f"{more}: load batches while others are computed; or prepare the data once, before training"
    return f"let rank {suspicion.ranks[0]} read its data as fast as the others do (its disk, its shard); or {more}"


def _fix_straggler(suspicion: Suspicion, around: Surroundings, cores: int) -> str:
    (rank,) = suspicion.ranks
    return (
        f"give rank {rank} no more work than the others, and look at its device and host: other processes on it "
        "(nvidia-smi, top), its clock and its cooling"
    )


_FIXES: dict[str, Callable[[Suspicion, Surroundings, int], str]] = {
    "data_loader": _fix_loader,
    "straggler": _fix_straggler,
    "uneven_batches": lambda s, a, c: (
        "give all ranks batches of similar size in the same step: sort or group samples by length (a batch sampler by "
        "length buckets), or cut and pad them to one length"
    ),
    "exposed_communication": lambda s, a, c: (
        "tune the job with autoddp: other buckets send gradients earlier, hooks (--allow near or lossy) send fewer "
        "bytes; if the script accumulates gradients, use no_sync()"
    ),
    "no_overlap": lambda s, a, c: (
        f"DistributedDataParallel(bucket_cap_mb={max(1, round(a.gradient_mib / 8))}): smaller buckets begin to travel "
        "while the backward pass goes on"
    ),
    "slow_link": lambda s, a, c: (
        "look at the link between the hosts: `autoddp bench` measures it, `autoddp probe` says what it should carry; "
        "choose the fast interface by NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"
    ),
    "find_unused_parameters": lambda s, a, c: "DistributedDataParallel(find_unused_parameters=False)",
    "buffer_broadcast": lambda s, a, c: (
        "DistributedDataParallel(broadcast_buffers=False): each rank then keeps its own buffers, for BatchNorm its own "
        "running statistics; SyncBatchNorm keeps them equal"
    ),
    "threads_oversubscribed": lambda s, a, c: f"OMP_NUM_THREADS={c}, or torch.set_num_threads({c}) in the script",
    "rank0_work": lambda s, a, c: (
        f"let rank {s.ranks[0]} log, evaluate and save less often, or in a thread of its own (asynchronous saving: "
        "torch.distributed.checkpoint.async_save)"
    ),
    "epoch_start": lambda s, a, c: "DataLoader(persistent_workers=True): its workers stay for the next epoch",
    "periodic_stall": lambda s, a, c: (
        "save less often or in a thread of its own (torch.distributed.checkpoint.async_save); where the garbage "
        "collector runs: gc.freeze() before training, or gc.collect() at chosen steps"
    ),
    "small_batch": lambda s, a, c: (
        "a larger batch per rank, or fewer ranks; --accumulate-up-to N lets autoddp reduce once in N steps"
    ),
    "host_device_copy": lambda s, a, c: "DataLoader(pin_memory=True) and batch.to(device, non_blocking=True)",
}


def scaling(evidence: Evidence, alone: Sequence[Evidence]) -> Scaling:
    """What several ranks give against one, from steps in which each rank has computed for itself."""
    ranks = len(evidence.ranks)
    blocks = alone or [evidence]
    one = statistics.fmean(statistics.fmean(block.means(block.own)) for block in blocks)
    whole = statistics.fmean(evidence.steps)
    efficiency = min(1.0, one / whole)
    gain = ranks * efficiency
    samples = evidence.samples
    per_second = None if samples is None else samples / whole
    of_one = None if samples is None else samples / ranks / one
    if ranks == 1:
        text = "one rank: there is nothing to scale"
    elif gain <= _AS_WELL:
        text = f"{ranks} ranks give {gain:.2f} times what one gives: one would do as well"
    else:
        text = f"{ranks} ranks give {gain:.2f} times what one gives ({efficiency:.0%} of perfect scaling)"
    return Scaling(ranks, per_second, of_one, efficiency, text)


def not_measured(evidence: Evidence, job: JobFacts, findings: Sequence[Finding]) -> list[str]:
    """What the diagnosis cannot say, as sentences."""
    found = []
    if not evidence.sees_loader:
        found.append(
            "the data loader: the script reads no torch DataLoader in its training loop, so waiting for data is part "
            "of `other`"
        )
    if all(device == "cpu" for device in job.devices):
        found.append("what only a GPU has: launches of kernels, copies to the device, waiting for it")
    else:
        found.append("launch_bound and sync_points: no experiment is known for them")
    if any(one.cause in ("rank0_work", "periodic_stall") for one in findings):
        found.append(
            "how long saving takes on your own disk: while a job is diagnosed, what it writes goes to a scratch "
            "folder, where it may be faster"
        )
    if len(evidence.ranks) == 1:
        found.append("everything between ranks: there is one")
    if any(one.status == "proved" and one.cause == "straggler" for one in findings):
        found.append("the waterfall without the straggler: a slow rank cannot be made faster for an experiment")
    return found


def verdict(seconds: float, findings: Sequence[Finding], waterfall: Sequence[Level], scaled: Scaling) -> list[str]:
    """At most three lines, the most important one first."""
    proved = [one for one in findings if one.status == "proved"]
    lines = []
    if findings and findings[0].status == "suspected":
        first = findings[0]
        lines.append(
            f"suspected: {first.cause}, up to {milliseconds(first.seconds)} of {milliseconds(seconds)} ms per step"
        )
    if proved:
        first = proved[0]
        lines.append(
            f"{first.cause}: mending it saves {milliseconds(first.seconds)} of {milliseconds(seconds)} ms per step "
            f"({first.seconds / seconds:.0%}): {first.fix}"
        )
        others = [f"{one.cause} ({milliseconds(one.seconds)} ms)" for one in proved[1:]]
        if others and len(lines) < 2:
            end = f"; all mended: {milliseconds(waterfall[-1].seconds)} ms per step" if len(waterfall) > 2 else ""
            lines.append(f"also proved: {', '.join(others)}{end}")
    elif not findings:
        lines.append(f"nothing found that costs 3 % of a step of {milliseconds(seconds)} ms")
    else:
        lines.append("nothing proved that costs 3 % of a step")
    lines.append(scaled.text)
    return lines
