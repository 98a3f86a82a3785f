"""Keeps a rank's threads on the NUMA node of its GPU. Without GPUs, ranks are spread over the host's NUMA nodes.

The binding changes in the running process: the scheduler moves the threads at once, and the memory that they allocate
from then on is near. Memory that the process has already stays where it is, so a trial shows rather less than the
launched job gains.

What the process has started moves too. The workers of the launched job's loaders begin when it is bound: in a trial in
which they had all cores, loading would seem to keep up. And those that begin in such a trial outlive it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoddp.knobs import Configuration
from autoddp.knobs.computing import BINDS_THREADS, NUMA_BINDING
from autoddp.log import tell
from autoddp.topology.system.files import number
from autoddp.topology.system.machine import usable_nodes
from autoddp.wire.started_with import local_rank, started_with
from autoddp.worker.effects.base import Effect
from autoddp.worker.process.device import pci_address
from autoddp.worker.process.heartbeat import descendants

_ask: Any = getattr(os, "sched_getaffinity", None)
"""The system's own answer: the script may be given another one, see `Binding`."""


class Binding(Effect):
    """The knob `numa_binding`. Create it when the script's model is on `device`.

    `why_not` says why the rank cannot be bound; "" if it can.
    """

    def __init__(self, device: torch.device) -> None:
        self._as_written = _allowed()
        self._bound = self._answers = False
        self._own_masks: set[int] = set()
        """Threads whose CPU mask differed from the main thread's when the others were moved; they are never moved."""
        self.why_not, self._near = _near(device, self._as_written)

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`."""
        self.bind(NUMA_BINDING.name in configuration)

    def bind(self, on: bool) -> None:
        """Move the threads that have the main thread's CPU mask to the near CPUs, or back. New ones inherit it.

        Threads with another mask were placed on purpose: NCCL puts its network threads near the GPU.
        """
        if on == self._bound or self.why_not:
            return
        self._bound = on
        if on:
            if not self._answers:
                self._answers = True
                self._answer_as_written()
            self._own_masks = {thread for thread in _threads() if _mask(thread) != self._as_written}
        before, now = (self._as_written, self._near) if on else (self._near, self._as_written)
        for thread in set(_threads()) - self._own_masks:
            if _mask(thread) != before:  # it was placed on purpose since, by `worker_init_fn` for example
                continue
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.sched_setaffinity(thread, now)

    def _answer_as_written(self) -> None:
        """Let `os.sched_getaffinity` of this process tell the script of the CPUs that it has without a binding.

        Many scripts start as many workers of a loader as it says. With fewer, loading would be slower, and augmentation
        would draw other random numbers; and torch would warn of workers that the script has asked for.
        """

        @functools.wraps(_ask)
        def sched_getaffinity(pid: int, /) -> set[int]:
            found = set(_ask(pid))
            is_own = pid in (0, os.getpid())
            return set(self._as_written) if is_own and self._bound and found == self._near else found

        os.sched_getaffinity = sched_getaffinity


def bind_without_a_model(device_type: str) -> None:
    """Bind this rank of a script without DDP, whose models are on the CPU ("cpu") or on a GPU ("cuda").

    On the CPU at once. Which GPU it takes shows at the first step of an optimizer: asking CUDA before would begin it.
    """

    def bind(device: torch.device) -> None:
        binding = Binding(device)
        binding.bind(True)
        if binding.why_not and started_with("RANK", "0") == "0":
            tell(f"warning: the recipe's {NUMA_BINDING.name} is left out: {binding.why_not}")

    if device_type == "cpu":
        bind(torch.device("cpu"))
        return

    def steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameter = next((one for group in optimizer.param_groups for one in group["params"]), None)
        if parameter is not None and parameter.device.type == device_type:
            handle.remove()
            bind(parameter.device)

    handle = register_optimizer_step_pre_hook(steps)


def _near(device: torch.device, allowed: Collection[int]) -> tuple[str, set[int]]:
    """Why the rank cannot be bound, or "", and the near CPUs."""
    asked = next((name for name in BINDS_THREADS if name in os.environ), "")
    if not allowed:
        return "the system has no CPU affinity", set()
    if asked:
        return f"{asked} is set", set()
    usable = usable_nodes(allowed)
    if len(usable) < 2:
        return "its CPUs are on one NUMA node", set()
    if device.type == "cuda":
        near = dict(usable).get(_node_of_gpu(device))
        return ("", near) if near else ("the GPU's NUMA node is not known", set())
    rank, ranks = local_rank(), int(started_with("LOCAL_WORLD_SIZE", "1"))
    if ranks < len(usable):
        return "fewer ranks than NUMA nodes: binding would leave CPUs idle", set()
    return "", usable[rank * len(usable) // ranks][1]


def _node_of_gpu(device: torch.device) -> int:
    """The NUMA node of the GPU; -1 if it is not known, or if the kernel assigns the GPU to none."""
    address = pci_address(device)
    found = None if address is None else number(Path("/sys/bus/pci/devices") / address / "numa_node")
    return -1 if found is None else found


def _allowed() -> set[int]:
    """CPUs on which the main thread may run; empty if the system has no affinity."""
    return _mask(os.getpid()) if _ask is not None else set()


def _mask(thread: int) -> set[int]:
    """CPUs on which a thread may run; empty if it has ended."""
    try:
        return set(_ask(thread))
    except OSError:
        return set()


def _threads() -> list[int]:
    """Threads of this process, and of all that it has started."""
    try:
        found = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:  # no Linux
        return [0]
    with contextlib.suppress(OSError):  # a kernel that does not list children
        for process in descendants("self"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found += [int(name) for name in os.listdir(f"/proc/{process}/task")]
    return found
