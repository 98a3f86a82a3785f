"""How gradients are cut into buckets: the size of each, and so how much of the reduction hides behind backward."""

from __future__ import annotations

from typing import Any

from autoddp.knobs.base import Knob, exact, number_between

SMALLEST_MIB = 0.5
LARGEST_MIB = 100_000.0  # more than the gradients of any model that one GPU holds
LONGEST_PLAN = 32  # entries; a longer list is a uniform cap in disguise
_cap = number_between(SMALLEST_MIB, LARGEST_MIB, "MiB")


def _check_plan(value: Any) -> str | None:
    good = isinstance(value, (list, tuple)) and 1 <= len(value) <= LONGEST_PLAN
    if good and all(_cap(entry) is None for entry in value):
        return None
    return f"must be a list of 1 to {LONGEST_PLAN} sizes from {SMALLEST_MIB:g} to {LARGEST_MIB:g} MiB"


BUCKET_CAP_MB = Knob(
    name="bucket_cap_mb",
    says="MiB per bucket: small ones start to travel earlier, large ones pay the latency less often",
    check=_cap,
    rung_of=exact,
    ddp_argument=True,
)

BUCKET_CAP_MB_LIST = Knob(
    name="bucket_cap_mb_list",
    says="MiB of each bucket, in the order gradients become ready; after backward, only the last is left to wait for",
    check=_check_plan,
    rung_of=exact,
    ddp_argument=True,
)


def caps(gradient_mib: float) -> list[float]:
    """The caps worth trying for that many MiB of gradients: powers of two up to the first that holds them all.

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
    """Plans whose buckets halve towards the end of backward, one for each size of the last bucket.

    The last bucket can overlap with nothing, so its size is what stays exposed; none is larger than a quarter of the
    whole, so that the first starts to travel early. Gradient-ready order, MiB.

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
