"""Is this job the one that the recipe was measured on? Asked in the real job, at each model's first training pass.

The launcher compares script, world and devices. Parameters, inputs and the backend are seen by the workers alone. Each
rank puts its answer into the store of the model's process group. The first rank that finds all answers there decides,
and puts the decision into the store too, so that all ranks do the same. No collective is added.

No forward pass waits, since another rank may never run one. Settings that change gradients wait for the decision in the
first reduction, which needs all ranks anyway. Settings that do not change gradients are used for one step, then taken
back at the next forward pass if the job is another one.
"""

# DDP reads a hook's annotations and wants its own types there: no `from __future__ import annotations`.
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.errors import JobStops
from autoddp.files import write_whole
from autoddp.recipe import input_differences, of_model
from autoddp.units import duration
from autoddp.wire.started_with import local_rank, started_with
from autoddp.worker.ddp.backward import after_this_backward, when_backward_begins
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.inputs import compares, inputs_of
from autoddp.worker.ddp.model import Model
from autoddp.worker.ddp.private import backend_of, device_of, store_of, time_limit_of
from autoddp.worker.ddp.wrapped import Wrapped, why_another_world
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.hooks import Hook
from autoddp.worker.hooks.bucket import GradBucket
from autoddp.worker.hooks.exact import exact_mean

_FITS = "fits"
_SOON = 10.0  # seconds for an answer that must be there already
_LOOKS, _LOOKS_LATER = 0.002, 0.05  # seconds between two looks into the store, at first and at most
_SILENT = 60.0  # seconds of waiting, after which one rank says so


@dataclass(frozen=True)
class Expected:
    """What the recipe says of its job, and what to do if this job is another one."""

    digests: tuple[str, ...]
    """Digests of the models' parameters; empty: nothing is compared."""
    inputs: tuple[str, ...]
    """See `recipe.inputs`; empty: parameters alone are compared."""
    recipe: str = "the recipe"
    note: str = ""
    """File in which to note that the next launch is to tune again; "" where that is left to the user."""
    noted: str = ""
    """First lines of that file."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the launcher has set because of the recipe."""
    backend: str = ""
    """Backend that reduced the gradients of the first of these models; "": not compared."""


@dataclass
class _Object:
    """What is known of one DDP object."""

    wrapped: Wrapped
    key: str
    is_late: bool
    """Whether it was built after a model that fits had been trained: tuning ends before it sees such a model."""
    mine: str | None = None
    """What this rank has found; "" if it fits, None before the first training pass."""
    reduced: bool = False
    """Whether a reduction has ended since: then all ranks have said what they have found."""
    answer: str | None = None
    """The decision of all ranks; "" if the recipe fits."""
    is_told: bool = False


class Fitting(DdpEvents):
    """`refused(wrapped, all_differ)` is called in a forward pass, before DDP's own part of it, on all ranks alike."""

    def __init__(
        self,
        expected: Expected,
        switch: ReductionSwitch,
        refused: Callable[[Wrapped, bool], None],
        warn: Callable[[str], None],
    ) -> None:
        self._expected, self._switch, self._refused, self._warn = expected, switch, refused, warn
        self._started = int(started_with("WORLD_SIZE", "0"))
        self._objects: list[_Object] = []
        self._built: dict[str, int] = {}
        self._has_fit = False

    def built(self, wrapped: Wrapped) -> None:
        """A DDP object, whether or not it has the recipe's configuration."""
        ddp = wrapped.ddp
        if ddp is None or not self._expected.digests:
            return
        # By group and not by process: a rank may have models in groups that others have no part in.
        group = _name(ddp.process_group)
        self._built[group] = number = self._built.get(group, -1) + 1
        one = _Object(wrapped, f"autoddp/fits/{number}", self._has_fit)
        self._objects = [o for o in self._objects if o.wrapped.ddp is not None] + [one]
        if wrapped.digest not in self._expected.digests:
            one.mine = one.answer = "parameter shapes and types are others"  # on all ranks: DDP has compared them
        elif why := why_another_world(ddp, self._started):
            one.mine = one.answer = why  # the launcher has compared the recipe with those that it has started
        elif why := self._other_backend(wrapped, ddp):
            one.mine = one.answer = why
        elif not self._expected.inputs:
            one.mine = one.answer = ""

    def _other_backend(self, wrapped: Wrapped, ddp: DDP) -> str:
        """Why the model trains elsewhere than the recipe's, as on GPUs in place of CPUs; "" if it does not.

        The launcher does not know on which devices a script trains. All ranks of a group have the same backend.
        """
        there, here = self._expected.backend, backend_of(ddp)
        is_known = there and wrapped.digest == self._expected.digests[0]
        return f"backend {there} in the recipe, {here} here" if is_known and here != there else ""

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass is about to run."""
        one = self._of(ddp)
        if one is None or one.is_told or not compares(ddp):
            return
        if one.answer is None and one.reduced:
            self._settle(one, _SOON)
        if one.answer is not None:
            self._tell(one)

    def called(self, ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the module is about to be called with."""
        one = self._of(ddp)
        if one is None or one.mine is not None or not (compares(ddp) and self._switch.as_written(ddp)):
            return
        digests = self._expected.digests
        wanted = of_model(self._expected.inputs, digests.index(one.wrapped.digest), len(digests))
        differences = input_differences(wanted, inputs_of(args, kwargs, device_of(ddp).type)) if wanted else ()
        moved = one.wrapped.why_untouchable() if one.wrapped.is_changed else ""  # the script may have done so since
        one.mine = "; ".join(filter(None, [moved, *differences]))
        store = store_of(ddp)
        if ddp.process_group.size() == 1:
            one.answer = one.mine
        elif store is None:
            one.answer = ""  # ranks that cannot agree must not decide
        else:
            _say(store, one.key, ddp.process_group.rank(), one.mine)

    def returned(self, ddp: DDP, what: Any) -> Any:
        """What the module has returned: a backward pass from it may be the first that reduces."""
        one = self._of(ddp)
        waits = one is not None and one.mine is not None and one.answer is None and not one.reduced
        if waits and self._switch.reduces(ddp):
            when_backward_begins(what, lambda: after_this_backward(lambda: self._has_reduced(one)))
        return what

    @staticmethod
    def _has_reduced(one: _Object | None) -> None:
        assert one is not None
        one.reduced = True

    def around(self, hook: Hook, group: dist.ProcessGroup, _model: Model) -> Hook:
        """The hook, if the job is the recipe's; else the exact mean. See `wrapped.Around`."""
        found: list[_Object | None] = []

        def fitting(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if not found:
                found.append(self._with_hook(this()))
            one = found[0]
            if one is not None and one.mine is not None and one.answer is None:
                self._settle(one, None)
            return exact_mean(group, bucket) if one is not None and one.answer else hook(state, bucket)

        this = weakref.ref(fitting)  # a hook that held itself would keep the group's threads alive
        return fitting

    def why_not(self) -> str:
        """What differs, asked after a backward pass, before gradients are kept that were not reduced; "" if nothing.

        All ranks ask in the same step, and each waits until all others have begun it.
        """
        for one in self._objects:
            if one.mine is not None and one.answer is None and one.wrapped.ddp is not None:
                self._settle(one, None)
        return next((one.answer for one in self._objects if one.wrapped.takes and one.answer), "")

    def _of(self, ddp: DDP) -> _Object | None:
        return next((one for one in self._objects if one.wrapped.ddp is ddp), None)

    def _with_hook(self, hook: Hook | None) -> _Object | None:
        # Not by a parameter: an earlier object around the same ones may be there still, and on some ranks only.
        return next((one for one in self._objects if one.wrapped.has_own(hook)), None)

    def _settle(self, one: _Object, seconds: float | None) -> None:
        """Wait for the decision of all ranks, for at most so long; None: as long as a collective may take.

        If not all ranks have answered by then, nothing is refused; with None the job stops. A rank in which autoddp
        could not begin never answers, and must not reduce with ranks that use the recipe's hook.
        """
        ddp = one.wrapped.ddp
        assert ddp is not None
        store, size, mine = store_of(ddp), ddp.process_group.size(), str(ddp.process_group.rank())
        limit = time_limit_of(ddp) if seconds is None else seconds

        def have_said() -> int:
            return int(store.add(f"{one.key}/said", 0))

        all_have_said = waited(lambda: have_said() >= size, min(limit, _SILENT))
        if not all_have_said and seconds is None:
            if store.compare_set(f"{one.key}/waits", "", mine).decode() == mine:
                self._warn(_waits(have_said(), size))
            if not waited(lambda: have_said() >= size, limit - _SILENT):
                raise JobStops(f"autoddp: {_waits(have_said(), size)}; the job stops after {duration(limit)}")
            all_have_said = True
        # The first rank decides for all, also for ranks that have waited until the limit: all must do the same.
        answer = store.compare_set(f"{one.key}/answer", "", _found(store, one.key) if all_have_said else _FITS)
        one.answer = "" if answer.decode() == _FITS else answer.decode()

    def _tell(self, one: _Object) -> None:
        ddp = one.wrapped.ddp
        assert ddp is not None
        one.is_told = True
        if not one.answer:
            self._has_fit = True
            return
        noted = not one.is_late and self._note(one.answer)
        if ddp.process_group.rank() == 0:
            self._warn(self._says(one, noted))
        all_differ = not self._has_fit and all(o.answer for o in self._objects if o.wrapped.ddp is not None)
        self._refused(one.wrapped, all_differ)

    def _says(self, one: _Object, noted: bool) -> str:
        stay = ", ".join(f"{name}={value}" for name, value in sorted(self._expected.variables.items()))
        what = "model" if self._has_fit else "job"
        again = "tuning sees only the first models" if one.is_late else "tune it with --trials 20"
        fix = "the next launch tunes again" if noted else again
        if self._expected.inputs and one.wrapped.takes and not self._expected.note:
            fix += "; --force uses the recipe all the same"
        return (
            f"{self._expected.recipe} was made for another {what} ({one.answer}): this {what} runs as written"
            f"{f', but {stay} was set at its start and stays' if stay else ''}; {fix}"
        )

    def _note(self, why: str) -> bool:
        """Whether the next launch will know. One rank of each host writes: hosts may have recipes of their own."""
        if not self._expected.note:
            return False
        if local_rank():
            return True
        try:
            write_whole(Path(self._expected.note), f"{self._expected.noted}{why}\n")
        except OSError:
            return False
        return True


def _waits(have: int, size: int) -> str:
    return (
        f"{have} of {size} ranks have come to their first reduction, and wait for the others to begin a forward "
        "pass; a rank in which autoddp did not begin (a warning above says why) never will: --trials 0 launches "
        "without a recipe"
    )


def _name(group: dist.ProcessGroup) -> str:
    """The group's name, or "": a group that was not made by torch's functions may have none, and no store either."""
    try:
        return str(group.group_name)
    except (AttributeError, RuntimeError):
        return ""


def _say(store: Any, key: str, rank: int, found: str) -> None:
    """Tell all ranks what this rank has found. The keys are few, because one store may serve thousands of ranks."""
    if found and rank == 0:
        store.set(f"{key}/first", found)
    elif found:
        store.compare_set(f"{key}/other", "", f"rank {rank}: {found}")
    store.add(f"{key}/said", 1)


def _found(store: Any, key: str) -> str:
    """What differs, once all ranks have answered: on rank 0, else on the rank that was the first to say so."""
    there = next((name for name in (f"{key}/first", f"{key}/other") if store.check([name])), None)
    return _FITS if there is None else str(store.get(there).decode())


def waited(is_there: Callable[[], bool], seconds: float) -> bool:
    """Whether `is_there` becomes true within that time. A blocking call would keep other threads from the store."""
    end, pause = time.monotonic() + seconds, _LOOKS
    while not is_there():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LOOKS_LATER)
    return True
