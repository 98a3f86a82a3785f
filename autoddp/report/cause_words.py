"""Causes of a slow job in the words of a colleague who does not know their names."""

from __future__ import annotations

_IN_WORDS = {
    "data_loader": "waiting for data",
    "straggler": "one rank is slower than the others",
    "uneven_batches": "the ranks' batches take different time",
    "uneven_work": "ranks are late by turns",
    "exposed_communication": "waiting for gradients",
    "needless_reductions": "needless reductions of gradients",
    "no_overlap": "gradients travel only after the backward pass",
    "slow_link": "a slow link between the hosts",
    "find_unused_parameters": "the search for unused parameters",
    "buffer_broadcast": "broadcasts of buffers",
    "threads_oversubscribed": "more threads than cores",
    "rank0_work": "work that rank 0 does alone",
    "epoch_start": "the start of each epoch",
    "periodic_stall": "a stall now and then",
    "small_batch": "small batches",
    "launch_bound": "launching kernels",
    "host_device_copy": "copies to the device",
    "sync_points": "waiting for the device",
}
"""Cause → the same for people who do not know our names."""


def in_words(cause: str) -> str:
    """The cause in words; its name where another version of autoddp has found it."""
    return _IN_WORDS.get(cause, cause)
