"""Gradients that a script keeps over a backward pass, where `gradient_as_bucket_view` would write over them.

Without that argument each backward pass after a `zero_grad` makes new gradients, and those that the script still holds
stay as they are. With it all gradients lie in DDP's buckets, and the next pass writes into the same memory. A script
that compares, adds or projects the gradients of two passes would then read the second one twice. A script that has put
tensors of its own into `.grad`, such as parts of one flat tensor, would lose them: DDP puts its own in their place.

A script may also give a gradient other memory, by `p.grad.data = …`. The tensor is the one by which DDP finds the
gradient's place in its bucket, so DDP would send what is in the old place, and the ranks would part.

A tuning job does not offer the knob to such scripts, see `first_steps.KeepsGradients`. The script may change, or begin
to do so later, so each pass under the knob is watched too (`BucketViews`).
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs.ddp_arguments import GRADIENT_AS_BUCKET_VIEW, KEEPS_GRADIENTS
from autoddp.worker.ddp.backward import after_reduction, when_backward_begins
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.private import base_of, has_final_buckets, holders_of, same_version_again, uses_of, version_of
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.process.heartbeat import no_frame_is_held


def are_held(gradients: Sequence[torch.Tensor], in_use: bool = True) -> bool:
    """Whether anything else holds one of the tensors themselves; `held_elsewhere` looks at their memory too."""
    with no_frame_is_held():
        return max(map(sys.getrefcount, gradients), default=0) > _references(in_use)


def held_elsewhere(gradients: Sequence[torch.Tensor], in_use: bool = True) -> bool:
    """Whether anything but this list, and `.grad` or a bucket if they are `in_use`, holds one of them or its memory.

    The caller must have each of them in this list alone, in no other variable.
    """
    # A tensor that is a part of another one holds that one too.
    wholes = {id(whole): whole for whole in map(base_of, gradients) if whole is not None}
    if are_held(gradients, in_use):
        return True
    known: Counter[int] = Counter()
    uses: dict[int, int] = {}
    with no_frame_is_held():
        if max(map(sys.getrefcount, wholes.values()), default=0) > _references(True):
            return True
        for tensor in (*gradients, *wholes.values()):
            storage, whole = tensor.untyped_storage(), base_of(tensor)
            pointer = storage.data_ptr()
            uses.setdefault(pointer, uses_of(storage))
            known[pointer] += 1 + (_in_a_complex_part() if whole is not None and whole.is_complex() else 0)
    return any(count > known[pointer] + _OF_THE_STORAGE_OBJECT for pointer, count in uses.items() if pointer)


_OF_THE_STORAGE_OBJECT = 1  # Python's object of a storage holds it, like each tensor in it


@functools.cache
def _in_a_complex_part() -> int:
    """How many tensors a part of a bucket of complex gradients holds in C++, in the memory of that bucket.

    DDP reduces such a bucket as real numbers, and makes each part anew from those.
    """
    bucket = torch.zeros(1, dtype=torch.complex64)
    part = torch.view_as_complex(torch.view_as_real(bucket)).view(1)
    return uses_of(part.untyped_storage()) - len((bucket, part)) - _OF_THE_STORAGE_OBJECT


@functools.cache
def _references(in_use: bool) -> int:
    """What `sys.getrefcount` says of a tensor in a list that nothing else in Python holds.

    In torch 2.13 it is one more if torch itself holds the tensor too, for example as a `.grad`; in other versions it is
    not. It also depends on the version of Python.
    """
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    gradients = [parameter.grad]
    if not in_use:
        parameter.grad = None
    return next(map(sys.getrefcount, gradients))


@functools.cache
def let_parts_be_detached() -> None:
    """From here on `p.grad.detach_()` does nothing where the gradient is a part of a bucket, as it does elsewhere.

    torch refuses it for every part of another tensor. Older scripts clear gradients that way, perhaps only at the end
    of an epoch, when no trial has seen it and the job would be lost.
    """
    of_torch: Any = torch.Tensor.detach_

    @functools.wraps(of_torch)
    def detach_(tensor: torch.Tensor) -> torch.Tensor:
        try:
            return cast("torch.Tensor", of_torch(tensor))
        except RuntimeError:
            if base_of(tensor) is None or tensor.requires_grad:
                raise
            return tensor  # there is nothing to detach it from

    torch.Tensor.detach_ = detach_  # type: ignore[assignment]


class _Place(NamedTuple):
    """The place of a tensor in its bucket."""

    pointer: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Watched:
    """The gradients of one object."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self.parameters = wrapped.parameters
        assert wrapped.ddp is not None
        # Listed once, because that takes longer than all else here. They must not outlive the script's model.
        self._ends = weakref.ref(wrapped.ddp, lambda _: self.parameters.clear())
        self.gives_copies = False
        """Whether `.grad` gets memory of its own after each pass, as without the knob."""
        self.passes = False
        """Whether a backward pass is under way."""
        self.reduces = False
        self.before: list[torch.Tensor | None] = []
        """The gradient of each parameter when the present pass began."""
        self.versions: list[int | None] = []
        """The version of each gradient in `before`, when the present pass began."""
        self.saved: list[tuple[torch.Tensor, torch.Tensor, Callable[[], object]]] = []
        """Tensors in the buckets that the script keeps, what they held when the present pass began, and what gives
        them the version of that moment."""
        # Weak, because strong ones would keep the first buckets, which DDP replaces after the first pass.
        self._views: list[weakref.ref[torch.Tensor]] = []
        self._places: list[_Place] = []
        """The place of each of these in its bucket."""
        self._holders = 0
        """How many hold each of these where it is no gradient and the script does not hold it."""
        self._storages: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []

    def forget_pass(self) -> None:
        """No pass is under way: the last one may have ended with an exception."""
        self.passes, self.before, self.versions, self.saved = False, [], [], []

    def begins(self) -> None:
        """Note the gradients at the beginning of a pass."""
        self.before = [p.grad for p in self.parameters]
        self.versions = [None if gradient is None else version_of(gradient) for gradient in self.before]

    @property
    def gave_gradients(self) -> bool:
        """Whether the pass has written any: `torch.autograd.grad` writes none, and DDP reduces nothing then."""
        now = [None if p.grad is None else version_of(p.grad) for p in self.parameters]
        return now != self.versions

    def kept(self) -> list[torch.Tensor]:
        """The tensors in the buckets that are no gradients any more, if the script may hold any of them."""
        # No `:=` here: its variable would be one more reference to the last one.
        views = [view for view in [reference() for reference in self._views] if view is not None]
        ordinary = _references(True)
        with no_frame_is_held():
            counts = list(map(sys.getrefcount, views))
            has_aliases = any(uses > least for uses, least in self._uses())
        holders = list(map(holders_of, views))
        are_few = sum(counts) <= ordinary * len(counts) and sum(holders) <= self._holders * len(holders)
        if are_few and not has_aliases:
            return []
        present = {id(p.grad) for p in self.parameters}
        held = [
            view
            for view, count, by in zip(views, counts, holders, strict=True)
            if has_aliases or count > ordinary or by > self._holders
        ]
        # While a tensor is the gradient, each pass adds to it also without the knob.
        return [view for view in held if id(view) not in present]

    def give_places_back(self) -> bool:
        """Put the tensors in the buckets back there, if the script has given them other memory; whether it has.

        A gradient goes on in the memory that the script has given it, as without the knob.
        """
        moved = False
        for reference, place in zip(self._views, self._places, strict=True):
            view = reference()
            whole = None if view is None else base_of(view)
            if view is None or whole is None or view.data_ptr() == place.pointer:
                continue
            moved = True
            for p in self.parameters:
                if p.grad is view:
                    p.grad = view.detach()
            view.data = whole.as_strided(place.size, place.stride, place.offset)
        return moved

    def look_again(self) -> None:
        """After a pass that has reduced, before any code of the script: remember where the gradients lie."""
        gradients = [gradient for gradient in [p.grad for p in self.parameters] if gradient is not None]
        views = [reference() for reference in self._views]
        if len(views) == len(gradients) and all(map(operator.is_, views, gradients)):
            # A hook or a future may have held some of a bucket when it was counted.
            counted = zip(self._storages, self._uses(), strict=False)
            self._storages = [(storage, min(uses, least)) for (storage, _), (uses, least) in counted]
            return
        parts = [gradient for gradient in gradients if base_of(gradient) is not None]
        self._views = [weakref.ref(part) for part in parts]
        self._places = [
            _Place(part.data_ptr(), part.size(), part.stride(), int(part.storage_offset())) for part in parts
        ]
        self._holders = max(0, min(map(holders_of, parts), default=0) - 1)  # each is a gradient now
        storages = {storage.data_ptr(): storage for storage in (part.untyped_storage() for part in parts)}
        self._storages = [(weakref.ref(storage), sys.maxsize) for storage in storages.values()]
        storages.clear()  # else it would count
        self._storages = [(of, uses) for (of, _), (uses, _) in zip(self._storages, self._uses(), strict=True)]

    def _uses(self) -> Iterator[tuple[int, int]]:
        """Uses now, and the fewest so far, of each storage that is still there. The script may hold it by itself."""
        for reference, least in self._storages:
            storage = reference()
            if storage is not None:
                yield uses_of(storage) + sys.getrefcount(storage), least


class BucketViews(DdpEvents):
    """Under `gradient_as_bucket_view`, gives the gradients memory of their own from the first pass that needs it on.

    That changes no collective, so each rank decides alone. `left_out(why)` is called once for each model; if it
    raises, the backward pass ends with its exception.
    """

    def __init__(self, switch: ReductionSwitch, left_out: Callable[[str], None]) -> None:
        self._switch, self._left_out = switch, left_out
        self._objects: list[_Watched] = []
        self._kept: set[str] = set()
        """Descriptions of models whose gradients the script has kept; see `worker.ddp.model`."""

    def built(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`. If the script itself has set the argument, it stays as the script wrote it."""
        self._objects = [one for one in self._objects if one.wrapped.ddp is not None]
        if wrapped.takes and not wrapped.arguments.get(GRADIENT_AS_BUCKET_VIEW.name):
            one = _Watched(wrapped)
            one.gives_copies = wrapped.model.description in self._kept
            self._objects.append(one)

    def forget(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        self._objects = [one for one in self._objects if one.wrapped is not wrapped]

    def forward_begins(self, ddp: DDP) -> None:
        """See `DdpEvents`."""
        one = self._of(ddp)
        if one is None:
            return
        one.forget_pass()
        if not has_final_buckets(ddp):
            one.before = [p.grad for p in one.parameters]

    def called(self, ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `DdpEvents`. Before the second pass DDP makes new buckets, and puts gradients into them."""
        one = self._of(ddp)
        if one is not None and one.before:
            self._put_back(one)

    def returned(self, ddp: DDP, what: object) -> object:
        """See `DdpEvents`. A backward pass from what the module has returned is the next that writes gradients."""
        one = self._of(ddp)
        if one is None or not torch.is_grad_enabled() or not ddp.gradient_as_bucket_view:
            return what
        let_parts_be_detached()
        one.reduces = self._switch.reduces(ddp)
        when_backward_begins(what, lambda: self._begins(one))
        return what

    def _of(self, ddp: DDP) -> _Watched | None:
        return next((one for one in self._objects if one.wrapped.ddp is ddp), None)

    @torch.no_grad()
    def _begins(self, one: _Watched) -> None:
        ddp = one.wrapped.ddp
        if one.passes or ddp is None:  # the script may drop its model between the two passes
            return
        one.passes = True
        if one.give_places_back():
            self._give_copies(one)
        kept = one.kept()
        if kept:
            self._give_copies(one)
            one.saved = [(view, view.clone(), same_version_again(view)) for view in kept]
        one.begins()
        after_reduction(ddp, one.reduces, lambda: self._ended(one))

    @torch.no_grad()
    def _ended(self, one: _Watched) -> None:
        if not one.passes:
            return
        one.passes = False
        new = [n for n, gradient in enumerate(one.before) if gradient is None]
        self._put_back(one)
        if not one.gives_copies:
            if one.reduces and one.gave_gradients:
                one.look_again()
            return
        for p in (one.parameters[n] for n in new if one.reduces):
            p.grad = None if p.grad is None else p.grad.clone()
        for kept, content, restore_version in one.saved:
            kept.copy_(content)
            restore_version()
        one.saved = []

    @torch.no_grad()
    def _put_back(self, one: _Watched) -> None:
        """Put back the gradients that the script holds, where DDP has put tensors of its own in their place."""
        before, one.before = one.before, []
        # No pairs of tensors: who holds a tensor is counted, and `zip` holds its last pair.
        places = [n for n, was in enumerate(before) if was is not None and one.parameters[n].grad is not was]
        if not places:
            return
        gradients = [cast("torch.Tensor", before[n]) for n in places]
        before.clear()
        if not one.gives_copies and held_elsewhere(gradients, in_use=False):
            self._give_copies(one)
        if one.gives_copies:
            for p, gradient in zip((one.parameters[n] for n in places), gradients, strict=True):
                if p.grad is not None:
                    gradient.copy_(p.grad)
                    p.grad = gradient

    def _give_copies(self, one: _Watched) -> None:
        if not one.gives_copies:
            self._left_out(KEEPS_GRADIENTS)
            one.gives_copies = True
            self._kept.add(one.wrapped.model.description)
