"""Knobs that are arguments of DistributedDataParallel: buckets, copies of gradients, and what DDP may assume."""

from __future__ import annotations

from typing import Any

from autoddp.knobs.base import Knob, Phase, Reach, Rung, boolean, number_between
from autoddp.knobs.job import OWN_HOOK, FirstLook, JobToTune
from autoddp.units import MIB

SMALLEST_MIB = 0.5
LARGEST_MIB = 100_000.0  # more than the gradients of any model that one GPU holds
LONGEST_PLAN = 32  # entries; a longer list is hardly different from a uniform cap
_FIRST_BUCKET_MIB = 1.0  # up to that much, DDP uses one bucket anyway: cutting it would only add latency
_cap = number_between(SMALLEST_MIB, LARGEST_MIB, "MiB")


def caps(gradient_mib: float) -> list[float]:
    """The bucket caps, in MiB, worth trying for `gradient_mib` MiB of gradients: powers of two, the last holds all.

    Larger caps are left out because they give the same single bucket.

    >>> caps(5.0)
    [0.5, 1.0, 2.0, 4.0, 8.0]
    >>> caps(1200.0)[-3:]
    [512.0, 1024.0, 2048.0]
    """
    found = [SMALLEST_MIB]
    while found[-1] < gradient_mib and found[-1] * 2 <= LARGEST_MIB:
        found.append(found[-1] * 2)
    return found


def shrinking_plans(gradient_mib: float) -> list[tuple[float, ...]]:
    """Lists of bucket sizes that halve towards the end of backward, one list for each size of the last bucket.

    Sizes are in MiB, in the order in which gradients become ready. The reduction of the last bucket overlaps with
    nothing, so its size decides what is left to wait for. No bucket is larger than a quarter of all gradients, so that
    the first bucket starts to travel early.

    >>> shrinking_plans(6.0)
    [(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5), (1.0, 1.0, 1.0, 1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (4.0, 4.0)]
    """
    plans = []
    for tail in (0.5, 1.0, 2.0, 4.0):
        plan = [tail]
        while sum(plan) < gradient_mib:
            plan.append(plan[-1] * 2 if plan[-1] * 2 <= min(gradient_mib / 4, LARGEST_MIB) else plan[-1])
        if 1 < len(plan) <= LONGEST_PLAN:
            plans.append(tuple(reversed(plan)))
    return plans


def _check_plan(value: Any) -> str | None:
    good = isinstance(value, (list, tuple)) and 1 <= len(value) <= LONGEST_PLAN
    if good and all(_cap(entry) is None for entry in value):
        return None
    return f"must be a list of 1 to {LONGEST_PLAN} sizes from {SMALLEST_MIB:g} to {LARGEST_MIB:g} MiB"


def _is_worth_cutting(job: JobToTune) -> bool:
    by_the_script = {BUCKET_CAP_MB.name, BUCKET_CAP_MB_LIST.name} & set(job.ddp_arguments)
    return bool(by_the_script) or job.gradient_bytes > _FIRST_BUCKET_MIB * MIB


def _why_no_other_cuts(look: FirstLook) -> str:
    if look.hook_sees_buckets:
        return OWN_HOOK_SEES_BUCKETS
    if not look.compiled:
        return ""
    if RECOMPILE in look.options:
        return "the module is compiled: a few caps are tried first, with optimize_ddp"
    return f"the module is compiled, and a new cap would compile it again: {RECOMPILE} tries a few"


def _why_not_static(look: FirstLook) -> str:
    if look.passes(STATIC_GRAPH.name):
        return "the script sets it already"
    if look.hook_sees_buckets:
        return OWN_HOOK_SEES_BUCKETS
    if not all(one.is_static for one in look.steps):
        return "gradients did not become ready once per step in one order, from the model's output on"
    if look.passes(FIND_UNUSED) and ALSO_STATIC not in look.options:
        return f"the script sets {FIND_UNUSED}, and the job would stop at the first unused one: {ALSO_STATIC} tries it"
    return ""


def why_no_views(look: FirstLook) -> str:
    """Why gradients must have memory of their own, outside of DDP's buckets; "" if they need none."""
    if look.passes(GRADIENT_AS_BUCKET_VIEW.name):
        return ""
    return KEEPS_GRADIENTS if any(one.keeps_gradients for one in look.steps) else ""


def _why_no_own_buffers(look: FirstLook) -> str:
    if any(one.joins for one in look.steps):
        return "the script uses join(), which ends with the buffers of the rank that trained longest"
    return look.why_buffers_alike if look.buffer_bytes else "DDP broadcasts no buffers here"


OWN_HOOK_SEES_BUCKETS = f"{OWN_HOOK}, whose result may depend on the buckets"
KEEPS_GRADIENTS = "the script keeps gradients, which the next backward pass would change"
RECOMPILE = "--recompile"
ALSO_STATIC = "--static-graph"
"""By this option a static graph is tried also where the script sets `FIND_UNUSED`."""
FIND_UNUSED = "find_unused_parameters"
"""The argument by which a script has DDP look for unused parameters in each step; a static graph ends that."""

BUCKET_CAP_MB = Knob[float](
    name="bucket_cap_mb",
    says="MiB per bucket: small ones start to travel earlier, large ones pay the latency less often",
    does=lambda mib: f"buckets of {mib:g} MiB",
    check=_cap,
    reach=Reach.DDP,
    candidates=lambda job: caps(job.gradient_bytes / MIB) if _is_worth_cutting(job) else [],
    why_not=_why_no_other_cuts,
)

BUCKET_CAP_MB_LIST = Knob[tuple[float, ...]](
    name="bucket_cap_mb_list",
    says="MiB of each bucket, in the order gradients become ready; after backward, only the last is left to wait for",
    does=lambda plan: (
        f"buckets of {max(plan):g} MiB" + ("" if plan[-1] == max(plan) else f", the last of {plan[-1]:g} MiB")
    ),
    check=_check_plan,
    reach=Reach.DDP,
    candidates=lambda job: shrinking_plans(job.gradient_bytes / MIB) if _is_worth_cutting(job) else [],
    why_not=_why_no_other_cuts,
    excludes="bucket_cap_mb",
)

GRADIENT_AS_BUCKET_VIEW = Knob[bool](
    name="gradient_as_bucket_view",
    says="gradients live inside the buckets: no copy, less memory",
    does=lambda on: f"gradients {'' if on else 'not '}kept in their buckets",
    check=boolean,
    reach=Reach.DDP,
    candidates=lambda _job: [True],
    why_not=why_no_views,
)

BATCHED_GRAD_COPY = Knob[bool](
    name="batched_grad_copy",
    says="one batched copy into each bucket instead of one per parameter",
    does=lambda on: "one copy into each bucket" if on else "a copy for each parameter",
    check=boolean,
    reach=Reach.DDP,
    candidates=lambda _job: [True],
)

STATIC_GRAPH = Knob[bool](
    name="static_graph",
    says="DDP assumes the same graph in every step; offered only where the tuning job saw that it holds",
    does=lambda on: f"the graph {'' if on else 'not '}taken to be the same in every step",
    check=boolean,
    reach=Reach.DDP,
    candidates=lambda _job: [True],
    why_not=_why_not_static,
    could_part_ranks=True,
)

OF_BUCKETS = (BUCKET_CAP_MB.name, BUCKET_CAP_MB_LIST.name, STATIC_GRAPH.name)
"""Knobs that change which gradients lie in one bucket. A static graph also reduces its first pass in another way."""

BROADCAST_BUFFERS = Knob[bool](
    name="broadcast_buffers",
    says="each rank keeps its own buffers (BatchNorm's running statistics); else DDP copies rank 0's before each pass",
    does=lambda _value: "each rank's own buffers",
    check=lambda value: None if value is False else "must be false",
    reach=Reach.DDP,
    rung=Rung.NEAR,
    changes="each rank keeps its own BatchNorm statistics",
    phase=Phase.LAST,  # it saves the same time whatever the other settings are
    candidates=lambda _job: [False],
    why_not=_why_no_own_buffers,
    option="--local-buffers",
    # Gradients do not depend on these buffers. But ranks that evaluate alone, and choose the learning rate by the
    # result, would choose different ones.
    could_part_ranks=True,
)
