"""What a diagnosis says in words: the fix of each cause in the user's own terms, scaling, the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.findings import WORTHWHILE, Finding, Level, Scaling
from autoddp.diagnose.suspicions import Surroundings, Suspicion, waiting_by_turns
from autoddp.knobs.env import keeps_memory
from autoddp.units import milliseconds, percent, ranks_text
from autoddp.wire import JobFacts

IN_SOME_STEPS = ("rank0_work", "epoch_start", "periodic_stall")
"""Causes that are at work in some steps only."""
_MUCH = 0.2  # of a step, from which it is told how much of it the script spends between two steps
_AS_WELL = 1.1  # times what one rank gives: no more than that is not worth several
_LOADING = "DataLoader(num_workers={workers}, persistent_workers=True)"


def fix(suspicion: Suspicion, around: Surroundings, fixed: bool | None) -> str:
    """What to change. `fixed`: whether `suspicion.fixed` is worth while; None where it was not tried."""
    if suspicion.cause == "data_loader":
        return _fix_loader(suspicion, around, fixed)
    if suspicion.cause == "host_device_copy":
        return _fix_copies(fixed)
    if suspicion.cause == "uneven_work":
        return _fix_uneven_work(fixed)
    return _FIXES[suspicion.cause](suspicion, around)


def _fix_loader(suspicion: Suspicion, around: Surroundings, fixed: bool | None) -> str:
    ways = []
    if fixed is not False and suspicion.fixed is not None:
        loading = _LOADING.format(workers=suspicion.fixed.mended.experiment.loader_workers)
        ways.append(f"{loading}: load batches while others are computed")
    if not fixed and not suspicion.kind:
        ways.append(
            "prepare the data once before training (decoded, cut to size, in few large files), or read it from a "
            "faster disk"
        )
    elif not fixed:
        these = ranks_text(suspicion.ranks)
        ways.append(f"let {these} read data as fast as the others do: look at the disk and at the shard there")
    return "; or ".join(ways)


def _fix_copies(fixed: bool | None) -> str:
    pinned = "DataLoader(pin_memory=True) with one worker or more, and batch.to(device, non_blocking=True)"
    ahead = "copy the next batch in a CUDA stream of its own while this one is computed (torch.cuda.Stream)"
    return ahead if fixed is False else pinned if fixed else f"{pinned}; or {ahead}"


def _fix_uneven_work(in_the_data: bool | None) -> str:
    ways = []
    if in_the_data is not False:
        ways.append(
            "give the ranks samples that take alike long in the same step: group them by that (a batch sampler), or "
            "limit what one sample may take"
        )
    if not in_the_data:
        ways.append("find what the ranks share and use by turns: a file lock, a disk, cores (top shows other programs)")
    return "; or ".join(ways)


def _fix_straggler(suspicion: Suspicion, around: Surroundings) -> str:
    (rank,) = suspicion.ranks
    if suspicion.kind == "cores":
        return (
            f"keep other programs off the cores of rank {rank} (top shows them), or give the rank cores of its own "
            "(taskset, numactl, the CPUs of its container)"
        )
    if suspicion.kind == "batches":
        return (
            f"give rank {rank} batches of the size that the others have: share the samples out evenly "
            "(DistributedSampler with drop_last=True), or cut and pad them to one length"
        )
    if suspicion.kind == "memory":
        return (
            f"GLIBC_TUNABLES={keeps_memory()}: every rank keeps freed memory for the next step, which may save more "
            "than this; autoddp tries it in a study of 10 trials or more"
        )
    if suspicion.kind == "clock":
        return (
            f"look at the cooling and the power limit of rank {rank}'s GPU "
            "(nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE,POWER)"
        )
    if suspicion.kind:
        return f"let rank {rank} do no more between two steps than the others{_OR_LOADING.get(suspicion.kind, '')}"
    return (
        f"give rank {rank} no more work than the others, and look at its device and host: other processes on it "
        "(nvidia-smi, top), its clock and its cooling"
    )


_OR_LOADING = {"unseen loading": "; if it loads its data there, make that as fast as it is on the others"}
"""What a rank may do between two steps where the script reads no loader of torch's."""
_EPOCH_STARTS = {
    "": "DataLoader(persistent_workers=True): its workers stay for the next epoch",
    "no workers": (
        "do once before training what the sampler and the data set do at the start of each epoch; or make epochs "
        "longer: let the sampler go through the data several times"
    ),
    "workers stay": (
        "make epochs longer, because workers load no batch of the next epoch before it begins: let the sampler go "
        "through the data several times"
    ),
}


_OF_LATE_RANKS = (
    "find what makes the ranks late by turns (a file lock, a disk or cores that they share, batches of different "
    "size), because faster communication does not mend that; then "
)


_FIXES: dict[str, Callable[[Suspicion, Surroundings], str]] = {
    "straggler": _fix_straggler,
    "uneven_batches": lambda s, a: (
        "give all ranks batches of similar size in the same step: sort or group samples by length (a batch sampler by "
        "length buckets), or cut and pad them to one length"
    ),
    "exposed_communication": lambda s, a: (
        (_OF_LATE_RANKS if s.kind == "late by turns" else "")
        + "tune the job with autoddp: other buckets send gradients earlier, hooks (--allow near or lossy) send fewer "
        "bytes; if the script accumulates gradients, use no_sync()"
    ),
    "needless_reductions": lambda s, a: (
        "enter DDP's no_sync() for the forward and backward passes of all micro-batches of a step but the last; a "
        "tuned job does so without a change (defer_reductions)"
    ),
    "no_overlap": lambda s, a: (
        f"DistributedDataParallel(bucket_cap_mb={a.smaller_cap:g}): smaller buckets begin to travel "
        "while the backward pass goes on"
    ),
    "slow_link": lambda s, a: (
        "look at the link between the hosts: `autoddp bench` measures it, `autoddp probe` says what it should carry; "
        "choose the fast interface by NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"
    ),
    "find_unused_parameters": lambda s, a: (
        "DistributedDataParallel(find_unused_parameters=False); autoddp tries static_graph=True, which ends the search "
        "too, where gradients became ready in one order in all steps that were watched"
    ),
    "buffer_broadcast": lambda s, a: (
        "DistributedDataParallel(broadcast_buffers=False): each rank then keeps its own buffers, for BatchNorm its own "
        "running statistics; SyncBatchNorm keeps them equal; where only BatchNorm has buffers, autoddp tries it with "
        "--local-buffers"
    ),
    "threads_oversubscribed": lambda s, a: (
        f"OMP_NUM_THREADS={a.cores_per_rank}, or torch.set_num_threads({a.cores_per_rank}) in the script"
    ),
    "rank0_work": lambda s, a: (
        f"let rank {s.ranks[0]} log, evaluate and save less often, or in a thread of its own (asynchronous saving: "
        f"torch.distributed.checkpoint.async_save){_OR_LOADING.get(s.kind, '')}"
    ),
    "epoch_start": lambda s, a: _EPOCH_STARTS[s.kind],
    "periodic_stall": lambda s, a: (
        "gc.freeze() before training, so that the collector passes over what is there already; gc.collect() less often"
        if s.kind == "collector"
        else "save and evaluate less often, or save in a thread of its own (torch.distributed.checkpoint.async_save)"
    ),
    "small_batch": lambda s, a: (
        "a larger batch per rank, or fewer ranks; --accumulate-up-to N lets autoddp reduce once in N steps"
    ),
    "launch_bound": lambda s, a: (
        "launch fewer kernels: torch.compile (mode='reduce-overhead' replays them as CUDA graphs), fused=True for the "
        "optimizer, a larger batch; autoddp tries CUDA graphs with --cuda-graphs"
    ),
    "sync_points": lambda s, a: (
        "keep values on the device (total += loss.detach()) and read them at these lines only every hundredth step, "
        "or copy them with non_blocking=True and read them one step later; leave torch.cuda.synchronize() out"
    ),
}


def scaling(evidence: Evidence, alone: Sequence[Evidence]) -> Scaling:
    """What several ranks give against one, from steps in which each rank has computed for itself."""
    ranks = len(evidence.ranks)
    blocks = alone or [evidence]
    whole = statistics.fmean(evidence.steps)
    # What some steps have beside the usual, such as an evaluation, one rank would have as well.
    events = whole - evidence.seconds
    one = statistics.fmean(statistics.fmean(block.means(block.own)) for block in blocks) + events
    efficiency = min(1.0, one / whole)
    gain = ranks * efficiency
    samples = evidence.samples
    per_second = None if samples is None else samples / whole
    of_one = None if samples is None else samples / ranks / one
    if ranks == 1:
        text = "One rank: there is nothing to scale"
    elif gain <= _AS_WELL:
        text = f"{ranks} ranks give {gain:.2f} times what one gives: one would do as well"
    else:
        text = f"{ranks} ranks give {gain:.2f} times what one gives ({percent(efficiency)} of perfect scaling)"
    return Scaling(ranks, per_second, of_one, efficiency, text)


def not_measured(evidence: Evidence, job: JobFacts, findings: Sequence[Finding]) -> list[str]:
    """What the diagnosis cannot say, as sentences."""
    found = []
    if not evidence.readers:
        found.append(
            "the data loader: the script reads no torch DataLoader in its training loop, so waiting for data is part "
            "of `other`"
        )
    if own := between_steps(evidence):
        found.append(
            f"what takes the script {milliseconds(own)} of {milliseconds(evidence.seconds)} ms between two steps on "
            "every rank (`other`): it is not taken apart"
        )
    if all(device == "cpu" for device in job.devices):
        found.append("what only a GPU has: launches of kernels, copies to the device, waiting for it")
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


def between_steps(evidence: Evidence) -> float:
    """Seconds that every rank spends between two steps, if that is much; else 0."""
    least = min(evidence.means(evidence.stage("other")))
    return least if least >= _MUCH * evidence.seconds else 0.0


def verdict(evidence: Evidence, findings: Sequence[Finding], waterfall: Sequence[Level], scaled: Scaling) -> list[str]:
    """At most three lines, the most important one first."""
    seconds = statistics.fmean(evidence.steps)
    proved = [one for one in findings if one.status == "proved"]
    own = between_steps(evidence)
    lines = []
    if findings and findings[0].status == "suspected":
        first = findings[0]
        lines.append(
            f"Suspected: {first.cause}, up to {milliseconds(first.seconds)} of {milliseconds(seconds)} ms per step"
        )
    if proved:
        first = proved[0]
        saved, whole = milliseconds(first.seconds), milliseconds(seconds)
        share, travel = percent(first.seconds / seconds), evidence.mean(evidence.transfer)
        beyond = first.seconds > travel + WORTHWHILE * seconds and waiting_by_turns(evidence)
        if first.cause == "exposed_communication" and beyond:
            lines.append(
                f"Without the reduction a step of {whole} ms is {saved} ms shorter ({share}; {first.cause}), but ranks "
                f"wait only {milliseconds(travel)} ms for their gradients; the rest is waiting for each other by "
                f"turns: {first.fix}"
            )
        else:
            lines.append(f"Mending {first.cause} saves {saved} of {whole} ms per step ({share}): {first.fix}")
        others = [f"{one.cause} ({milliseconds(one.seconds)} ms)" for one in proved[1:]]
        if others and len(lines) < 2:
            end = f"; all mended: {milliseconds(waterfall[-1].seconds)} ms per step" if len(waterfall) > 2 else ""
            lines.append(f"Also proved: {', '.join(others)}{end}")
    elif not findings:
        rest = f", of which the script spends {milliseconds(own)} ms between two steps" if own else ""
        lines.append(f"Nothing found that costs 3 % of a step of {milliseconds(seconds)} ms{rest}")
    else:
        lines.append("Nothing proved that costs 3 % of a step")
    if findings and own > findings[0].seconds and len(lines) < 2:
        lines.append(
            f"Every rank spends {milliseconds(own)} of {milliseconds(seconds)} ms between two steps (`other`), which "
            "is not taken apart"
        )
    lines.append(scaled.text)
    return lines
