"""CPU threads of one rank."""

from __future__ import annotations

from autoddp.knobs.base import Knob, exact, whole_number_between

THREADS = Knob(
    name="threads",
    says="CPU threads of one rank for one operator: ranks of a node share its cores",
    check=whole_number_between(1, 1024),
    rung_of=exact,
    ddp_argument=False,
    variable="OMP_NUM_THREADS",
)


def thread_counts(cpus: int, ranks: int, now: int) -> tuple[int, ...]:
    """The counts worth trying where `ranks` ranks share `cpus` CPUs: powers of two up to the fair share, and the share.

    Not `now`, which is the baseline. Hosts that are containers of one machine share more than they can see, so small
    counts stand here although the share is large.

    >>> thread_counts(cpus=2, ranks=1, now=2)
    (1,)
    >>> thread_counts(cpus=24, ranks=2, now=1)
    (2, 4, 8, 12)
    """
    share = max(1, cpus // ranks)
    powers = [2**exponent for exponent in range(share.bit_length()) if 2**exponent <= share]
    return tuple(sorted({*powers, share} - {now}))
