"""Checks that the ranks still have the same parameters, in a real job whose recipe leaves out or changes reductions.

A fault of autoddp there, or a machine that loses data under a setting of NCCL's, would let each rank train a model of
its own, and nothing else would show it. So rank 0 writes a checksum of what DDP reduces into the job's store, several
times early on and rarely later, and each other rank compares its own with it in one of its next forward passes. No
collective is added, no rank waits, and a rank may run a forward pass alone. If the checksums differ, every rank stops
with an exception that names the knob.

Ranks may differ on purpose. So nothing is compared for parameters that DDP does not reduce, for ranks that differ at
the first step, for an object whose script has once stepped without reducing (local SGD) or reduces by a communication
hook of its own, for passes inside `join()` or in evaluation, between ranks whose learning rates have once differed (as
by `ReduceLROnPlateau` with each rank's own loss), and between ranks on unlike devices, whose arithmetic may differ in
the last bit. Parameters that a script changes only for a pass, and then puts back, are no difference either.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import Optimizer

from autoddp.errors import JobStops
from autoddp.knobs import BY_NAME, Configuration
from autoddp.knobs.ddp_arguments import BROADCAST_BUFFERS
from autoddp.knobs.env import START_KNOBS
from autoddp.log import tell
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.private import device_of, is_joining, store_of
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.access import GradientHandler, add_handler, held_by, ids_of
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.process.device import devices_of, is_capturing, name_of

_EARLY = (0, 2, 10, 100)  # steps; 0 is before the first
_EVERY = 1000  # a look reads each parameter twice, as a small part of one step does: within 0.1 % of the time
_WAITING = 8  # checksums that a rank keeps until rank 0 has written its own
_OFF = (
    "warning: this version of torch does not tell by which store the ranks have met, so their parameters are "
    "not compared in this job"
)
_HEARD_FOR = 8  # forward passes after a look in which a rank asks whether another one has found a difference


def knobs_that_part_ranks(configuration: Configuration, variables: Mapping[str, str]) -> str:
    """The knobs by which ranks could come to differ, with their values, as text; "" if there are none.

    `variables`: what the recipe has set in the environment. A machine that loses data under one of them may be another
    one than the recipe was made on.
    """
    plain = configuration.plain()
    # Not a `Configuration`: some of these knobs are valid only beside others, by which ranks cannot come to differ.
    found = {name: value for name, value in plain.items() if BY_NAME[name].could_part_ranks}
    lossy = [knob.variable for knob in START_KNOBS if knob.may_lose_data and knob.variable in variables]
    return " ".join(
        [*(f"{name}={json.dumps(value)}" for name, value in found.items()), *(f"{n}={variables[n]}" for n in lossy)]
    )


@dataclass
class _Object:
    """What is known of one DDP object."""

    number: int
    """Position in the order of construction, the same on every rank."""
    ids: frozenset[int]
    steps: int = 0
    stepped: set[int] = field(default_factory=set)
    """The optimizers that have stepped since the last forward pass, by their addresses."""
    reduces: bool = False
    """Whether a pass has reduced since the last step."""
    rates: int = 0
    """A checksum of the learning rates of all steps so far."""
    is_off: bool = False
    looks: list[int] = field(default_factory=lambda: list(_EARLY))
    after_step: str = ""
    """Checksum of the parameters as an optimizer has left them, where the next forward pass is one of a look."""
    mine: dict[int, str] = field(default_factory=dict)
    """This rank's checksums by step, of those that are still to be compared with rank 0's; the oldest first."""
    hears: int = 0
    passes: int = 0
    """Forward passes that reduce: counted alike on all ranks, so that all stop at the same one."""


class ParameterCheck(DdpEvents, GradientHandler):
    """Stops the job where ranks differ, with a message that names `knobs`."""

    def __init__(self, knobs: str, switch: ReductionSwitch) -> None:
        self._knobs, self._switch = knobs, switch
        # With buffers of its own a rank may choose another rate than under torchrun: then the knob is to blame.
        self._rates_are_the_scripts = BROADCAST_BUFFERS.name not in knobs
        self._objects: dict[Wrapped, _Object] = {}
        self._built = 0
        self._has_said_that_it_is_off = False
        add_handler(self)

    def built(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        self._objects = {w: o for w, o in self._objects.items() if w.ddp is not None}
        self._objects[wrapped] = _Object(self._built, ids_of(wrapped.parameters))
        self._built += 1

    def forget(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        self._objects.pop(wrapped, None)

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass is about to run. JobStops where the ranks have parted."""
        wrapped = next((w for w in self._objects if w.ddp is ddp), None)
        if wrapped is None or not torch.is_grad_enabled() or not ddp.training:
            return
        one = self._objects[wrapped]
        if one.stepped:
            one.steps = one.steps + 1
            one.stepped.clear()
            # As the script has it: what a knob puts off is still to be the same on every rank.
            one.is_off |= not one.reduces
            one.reduces = False
        one.reduces |= self._switch.as_written(ddp)
        one.is_off |= is_joining(ddp) or ddp.process_group.size() == 1 or wrapped.script_hook is not None
        if one.is_off or not self._switch.as_written(ddp):
            return
        one.passes += 1
        self._look(one, wrapped, ddp)

    def after_step(self, optimizer: Optimizer) -> None:
        """See `GradientHandler`."""
        held = ids_of(held_by(optimizer))
        for wrapped, one in self._objects.items():
            if one.ids.isdisjoint(held):
                continue
            one.is_off |= id(optimizer) in one.stepped  # local steps too, by passes of the module alone
            one.stepped.add(id(optimizer))
            if self._rates_are_the_scripts:
                one.rates = zlib.crc32(repr(_learning_rates(optimizer)).encode(), one.rates)
            ddp = wrapped.ddp
            if ddp is None or one.is_off or one.steps + 1 < one.looks[0]:
                continue
            if not is_capturing(device_of(ddp)):  # a script may capture a whole step in a CUDA graph
                one.after_step = checksum(wrapped.parameters)

    def _look(self, one: _Object, wrapped: Wrapped, ddp: DDP) -> None:
        # A rank that is ahead asks until rank 0 has written: where a fault leaves out all reductions, no rank waits.
        asks = one.hears or (one.mine and ddp.process_group.rank() != 0)
        if not asks and one.steps < one.looks[0]:
            return
        store, rank = store_of(ddp), ddp.process_group.rank()
        if store is None:
            one.is_off = True
            if rank == 0 and not self._has_said_that_it_is_off:
                self._has_said_that_it_is_off = True
                tell(_OFF)
            return
        if asks:
            one.hears = max(0, one.hears - 1)
            self._hear(one, rank, store)
        if one.steps >= one.looks[0]:
            # Steps are counted alike on all ranks, so all are at the same look.
            step = one.looks.pop(0)
            one.looks = one.looks or [step + _EVERY if step >= _EVERY else _EVERY]
            now = checksum(wrapped.parameters)
            seen, one.hears = f"{(one.after_step or now).split()[0]} {now} {one.rates:08x}", _HEARD_FOR
            one.after_step = ""
            if rank == 0:
                store.set(_key(one, step), seen)
                _forget_old(step, one, store)
            elif len(one.mine) < _WAITING:
                one.mine[step] = seen

    def _hear(self, one: _Object, rank: int, store: Any) -> None:
        """Stop if a rank has found a difference; else compare, if rank 0 has written its checksum."""
        said = f"autoddp/check/{one.number}/differs"
        if store.check([said]):
            at, _, why = store.get(said).decode().partition(" ")
            if one.passes >= int(at):
                raise JobStops(why)
            return
        if rank == 0 or not one.mine or not store.check([_key(one, step := next(iter(one.mine)))]):
            return
        if not _has_parted(one.mine.pop(step), store.get(_key(one, step)).decode()):
            return
        if step == 0:
            one.is_off = True  # they differ before anything was trained: the script has made them so
            return
        why = (
            f"rank {rank} has other parameters than rank 0 after {step} steps under the recipe's "
            f"{self._knobs}: the job stops; launch it without the recipe (--trials 0), or tune again (--trials 20)"
        )
        tell(why)
        # A backward pass lies before the next forward pass, so all ranks see this by then.
        store.set(said, f"{one.passes + 1} autoddp: {why}")


def _has_parted(mine: str, theirs: str) -> bool:
    """Whether parameters differ both after the step and before the next forward pass, on like devices at like rates.

    A script may part its ranks for a pass and put the parameters back (SAM and other perturbations, from some step on).
    Or each rank steps a part of them, and they are alike when the ranks have exchanged their parts.
    """
    my_step, my_pass, my_rest = mine.split(" ", 2)
    their_step, their_pass, their_rest = theirs.split(" ", 2)
    return my_rest == their_rest and my_step != their_step and my_pass != their_pass


def _forget_old(step: int, one: _Object, store: Any) -> None:
    """Remove a checksum that no rank compares any more: weeks of short steps would fill the memory of the store."""
    old = step - _WAITING * _EVERY
    if old >= _EVERY:
        with contextlib.suppress(RuntimeError):  # a store of the script's own may have no such function
            store.delete_key(_key(one, old))


def _learning_rates(optimizer: Optimizer) -> list[float]:
    """Learning rates that are plain numbers: to read a tensor, its device would have to finish first."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [rate for rate in rates if isinstance(rate, (int, float))]


def _key(one: _Object, step: int) -> str:
    return f"autoddp/check/{one.number}/{step}"


@torch.no_grad()
def checksum(parameters: Sequence[torch.Tensor]) -> str:
    """Checksum of all bits, in 16 hex digits, and the device on which it was computed."""
    # One sum for each device of a model that lies on several: only those are waited for, not each parameter.
    totals = {device: torch.zeros((), dtype=torch.int64, device=device) for device in devices_of(parameters)}
    for number, parameter in enumerate(parameters, start=1):
        totals[parameter.device] += number * sum_of_bits(parameter)
    return f"{sum(map(int, totals.values())) & (2**64 - 1):016x} {_device(parameters[0].device)}"


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of one number, on the same device: another one, all but surely, where any bit is another.

    In parts, because torch sums a copy in 64 bits: of a large embedding it would take up to eight times its memory.
    """
    # A parameter may be a conjugate that nobody has computed yet, and so may a gradient: that has no bits of its own.
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    bits = plain.detach().view(_INTEGERS[plain.element_size()])
    if bits.numel() <= _AT_ONCE:
        return bits.sum(dtype=torch.int64)
    bits = bits.view(-1) if bits.is_contiguous() else bits
    parts = bits.split(max(1, _AT_ONCE * len(bits) // bits.numel()))
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


_AT_ONCE = 2**24  # numbers that are summed at once: their copy takes 128 MiB

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return name_of(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
