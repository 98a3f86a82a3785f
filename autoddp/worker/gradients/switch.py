"""Switches DDP's reduction off and on for all objects, and notices parameters that change while it is off."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.errors import JobStops
from autoddp.worker.ddp.patch import around_ddps_own
from autoddp.worker.ddp.private import ask_before_preparing, learns_order, must_reduce, version_of
from autoddp.worker.ddp.wrapped import Wrapped


class ReductionSwitch:
    """DDP's `require_backward_grad_sync`, overruled for all objects at once where DDP itself reads it, and only there.

    The headroom is measured with reduction off as under `no_sync`, also in scripts that set the attribute themselves.
    A script, and `no_sync` on its behalf, saves the attribute and restores it: it must read its own value, or reduction
    would stay off for good.
    """

    _NAME = "require_backward_grad_sync"

    def __init__(self, of: Callable[[DDP], Wrapped | None]) -> None:
        """`of` gives what is known of an object, as `Patch.of` does; one that it does not know is not overruled."""
        self._of = of
        self.on = True
        self.put_off = False
        """Whether the backward pass of the present forward pass leaves its reduction to a later one."""
        self.learns_again = False
        """Whether a pass in which DDP learns a static graph reduces under `no_sync` too, where torch fails otherwise.

        A trial begins with a new reducer, which learns it in whichever pass the script makes then."""
        self.script_prepares: Callable[[object], None] = lambda reducer: None
        """Called where a script prepares the reducer of an object whose last forward pass, if any, does not reduce."""
        self._read_by_ddp = False
        self._asked: weakref.WeakKeyDictionary[DDP, bool] = weakref.WeakKeyDictionary()
        """Object → whether its last forward pass reduces, as the script has it; of those of which DDP has asked."""

    def install(self) -> None:
        """Put the property on the class; the instances keep their own values in their dictionaries."""
        setattr(DDP, self._NAME, property(self._get, self._set))
        around_ddps_own(self._while_ddp_reads)
        ask_before_preparing(self._may_be_prepared)

    def _may_be_prepared(self, reducer: object) -> bool:
        """Whether this reducer may be prepared for a backward pass; DDP itself does so only where it reduces.

        Some scripts do so too: Lightning where a module optimizes by hand, within a forward pass that reduces;
        Accelerate in `trigger_sync_in_backward`, and torch's pipelines, after forward passes under `no_sync`.
        """
        if self._read_by_ddp:
            return True
        ddp = next((one for one in self._asked if one.__dict__.get("reducer") is reducer), None)
        if ddp is None or not self._asked[ddp]:
            self.script_prepares(reducer)
        return self.on or ddp is None or must_reduce(ddp) or self._of(ddp) is None

    def as_written(self, ddp: DDP) -> bool:
        """Whether the script has this object reduce now."""
        return bool(ddp.__dict__.get(self._NAME, True))

    def reduces(self, ddp: DDP) -> bool:
        """Whether the backward pass of this object's present forward pass reduces."""
        left_alone = must_reduce(ddp) or self._of(ddp) is None
        asked = self.as_written(ddp) or (self.learns_again and learns_order(ddp))
        return asked and (left_alone or (self.on and not self.put_off))

    def _get(self, ddp: DDP) -> bool:
        if not self._read_by_ddp:
            return self.as_written(ddp)
        self._asked[ddp] = self.as_written(ddp)
        return self.reduces(ddp)

    @contextlib.contextmanager
    def _while_ddp_reads(self) -> Iterator[None]:
        before, self._read_by_ddp = self._read_by_ddp, True
        try:
            yield
        finally:
            self._read_by_ddp = before

    def _set(self, ddp: DDP, value: bool) -> None:
        ddp.__dict__[self._NAME] = value


def left_unreduced(what: str, knob: str) -> JobStops:
    """The error that stops a job in which it is too late to reduce what `knob` has put off."""
    return JobStops(
        f"autoddp: {what}, where the recipe's {knob} has left gradients unreduced: the job stops; launch it without "
        "the recipe (--trials 0), or tune again (--trials 20)"
    )


class StillThere:
    """Checks that parameters do not change while their gradients are not reduced: `begin`, then `check`."""

    def __init__(self, knob: str) -> None:
        self._knob = knob
        self._seen: list[tuple[torch.Tensor, int]] = []

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """The parameters must not change from now until `end`. The first and the last are looked at, for all."""
        if not self._seen and parameters:
            self._seen = [(p, version_of(p)) for p in (parameters[0], parameters[-1])]

    def end(self) -> None:
        """The parameters may change again."""
        self._seen = []

    def check(self) -> None:
        """JobStops if they have: the script has stepped by the `.grad` of its own rank, without an optimizer."""
        if any(version_of(p) != version for p, version in self._seen):
            raise left_unreduced("the script changes parameters without a torch optimizer", self._knob)
