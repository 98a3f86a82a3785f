"""Stands in front of torch's DataLoader: times how long the script waits for a batch, and gives it kept batches.

The iterator's class is patched in place, so the patch reaches iterators that exist already. This is the only file that
uses private names of the DataLoader. Loaders that are not torch's are not seen, nor is what a validation reads.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import multiprocessing
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autoddp.topology import free_memory, own_memory
from autoddp.units import MIB
from autoddp.wire.experiment import ON_DEVICE, PINNED, PREFETCHED
from autoddp.wire.started_with import started_with
from autoddp.worker.ddp.held import field_of, parts_of
from autoddp.worker.observe.training_thread import TrainingThread
from autoddp.worker.process.device import has_room, keep_for_current_stream, ready_at_once

KEPT = 40
"""Batches of each loader that are kept, as far as `_MOST_BYTES` allows."""
_MOST_BYTES = 256 * MIB
_MOST_PARTS = 10_000  # of a batch, in which its tensors are looked for: it may lead to the whole data set
_MOST_IN_A_STEP = 1000  # batches of a stream whose length is not known
_PATIENCE = 10.0  # seconds for a batch of our own workers: a fork may take a lock along that nobody gives back


class LoaderEvents:
    """Handles what the script asks of its loaders. The methods do nothing here."""

    optimizer_steps = 0
    """How often optimizers have stepped."""

    def wait_begins(self) -> None:
        """The script asks for a batch, or for a new iterator."""

    def wait_ends(self) -> None:
        """The script has got what it asked for."""

    def gave(self, samples: int, elements: int, was_ready: bool = False) -> None:
        """A batch of so many samples, with so many numbers in its tensors, is about to be given to the script.

        `was_ready`: whether worker processes had it ready when the script asked.
        """

    def iterator_made(self) -> None:
        """The script has asked for a new iterator: it begins an epoch."""


@dataclass
class _Kept:
    """Copies of batches of one loader."""

    data_set: Callable[[], Any]
    """Gives the data set; None once it has gone."""
    kind: object
    batches: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    bytes: int = 0
    full: bool = False
    place: int = 0
    """Position of the next batch to give: a later block goes on where the one before it ended."""
    place_in_sizes: int = 0
    indices: list[Any] = field(default_factory=list)
    """Indices of the samples in each batch that was drawn meanwhile; none where the data set has no indices."""
    loaded: Iterator[Any] | None = None
    """Batches of the same size from the same data set, loaded by workers of our own."""
    no_workers: bool = False
    """Whether these workers have failed."""
    workers: set[Any] = field(default_factory=set)
    """Processes of `loaded`."""
    moved: list[Any] = field(default_factory=list)
    """The kept batches in other memory."""
    moved_to: str = ""
    """The memory in which `moved` lies, see `Experiment.memory`."""
    no_room: bool = False
    """Whether the memory of `moved_to` was full."""

    def add(self, batch: Any, elements: int, size: int) -> None:
        """Keep a copy of `batch`, if there is room."""
        self.bytes += size
        self.full = bool(self.batches) and self.bytes > _MOST_BYTES
        if self.full:
            return
        try:
            self.batches.append(_copied(batch))
        except Exception:  # a batch with an object of the script's own may refuse to be copied
            self.full = True
            return
        self.sizes.append(elements)
        self.full = len(self.batches) >= KEPT

    def following(self, sizes: Sequence[int], rank: int, memory: str, device: torch.device | str) -> Any:
        """A copy of the next kept batch, or of the one whose size is nearest to the next of `sizes`.

        `memory`: see `Experiment.memory`. Where that is full, the copy is as the script's loader gave the batch.

        After the last one comes the first one again. Then each rank begins at another place, so that its batches meet
        others of the other ranks.
        """
        if sizes:
            size, self.place_in_sizes = sizes[self.place_in_sizes % len(sizes)], self.place_in_sizes + 1
            chosen = min(range(len(self.batches)), key=lambda place: abs(self.sizes[place] - size))
        else:
            rounds, place = divmod(self.place, len(self.batches))
            chosen, self.place = (place + rounds * rank) % len(self.batches), self.place + 1
        if memory != ON_DEVICE:
            return _copied(self._in(memory, device, chosen) if memory else self.batches[chosen])
        # A script may use its batch on another stream, which does not wait for this one: its loader gives it what lies
        # in the host's memory.
        with ready_at_once(torch.device(device)):
            batch = _copied(self._in(memory, device, chosen))
        for tensor in _tensors_of(batch):
            keep_for_current_stream(tensor)
        return batch

    def _in(self, memory: str, device: torch.device | str, place: int) -> Any:
        if memory != self.moved_to:
            self.leave()
            self.moved_to = memory
            self.no_room = not self._fits(memory, device)
            try:  # all of them in the first step of a block, which is not timed
                if not self.no_room:
                    self.moved = [_moved(batch, memory, device) for batch in self.batches]
            except RuntimeError:  # CUDA's out of memory is one
                self.no_room = True
        return self.batches[place] if self.no_room else self.moved[place]

    def leave(self) -> None:
        """Free the other memory."""
        self.moved, self.moved_to, self.no_room = [], "", False

    def _fits(self, memory: str, device: torch.device | str) -> bool:
        """Whether all kept batches do. Other ranks of the host keep theirs, too."""
        if memory != PINNED:
            return has_room(torch.device(device), self.bytes)
        return 2 * int(started_with("LOCAL_WORLD_SIZE", "1")) * self.bytes <= free_memory()

    def drawn(self, index: Any) -> None:
        """The sampler has drawn the indices of a batch."""
        if len(self.indices) < KEPT:
            self.indices.append(copy.copy(index))

    def has_room_for(self, workers: int) -> bool:
        """Whether memory is enough, even if each worker comes to have a copy of all that this process has.

        Only half of what is free may be taken. The workers' batches travel in shared memory, which containers often
        have little of; a process that finds it full is killed.
        """
        ranks = int(started_with("LOCAL_WORLD_SIZE", "1"))
        waiting = ranks * (PREFETCHED + 1) * workers * self.bytes // len(self.batches)
        place = os.statvfs("/dev/shm")
        fits = 2 * waiting <= place.f_bavail * place.f_frsize
        return fits and 2 * ranks * workers * own_memory() <= free_memory()

    def from_workers(self, like: _BaseDataLoaderIter, workers: int) -> Any:
        """The next batch, loaded by `workers` processes. Any exception of the script's data set."""
        if self.loaded is None:
            # Python's own choice, "forkserver" from 3.14 on, is none of the script's: whoever makes a lock has made it.
            pythons_own = multiprocessing.get_all_start_methods()[0]
            if multiprocessing.get_start_method(allow_none=True) not in (None, "fork", pythons_own):
                raise RuntimeError("other ways to start a worker run the script's main module once more")
            samples = _others(self.indices, _size_of(like._dataset))  # a generator would keep the data set alive
            chosen: dict[str, Any] = (
                {"batch_sampler": samples} if like._auto_collation else {"batch_size": None, "sampler": samples}
            )
            before = set(multiprocessing.active_children())
            loaded = iter(
                DataLoader(
                    like._dataset,
                    **chosen,
                    num_workers=workers,
                    multiprocessing_context="fork",
                    collate_fn=like._collate_fn,
                    pin_memory=like._pin_memory,
                    persistent_workers=True,
                    prefetch_factor=PREFETCHED,
                    timeout=_PATIENCE,
                    worker_init_fn=getattr(like, "_worker_init_fn", None),
                    # The script's own random numbers stay as they are. torch draws a seed on the default device.
                    generator=torch.Generator(torch.get_default_device()),
                )
            )
            self.workers = set(multiprocessing.active_children()) - before
            _let_die_in_silence(loaded)
            loaded._dataset = None  # type: ignore[assignment]  # the script may drop its data set
            self.loaded = loaded
        return next(self.loaded)

    def end_workers(self) -> None:
        """End them at once: torch would wait 5 seconds for each one that hangs."""
        for process in self.workers:
            process.terminate()
        self.loaded, self.workers = None, set()


class Loaders:
    """All of the script's loaders. `install()` patches torch's classes, which costs next to nothing until it is used.

    A loader is known by its data set, because most scripts make a new iterator for each epoch, and some a new loader.
    If a script makes a new data set each time, a loader of the same kind is taken for the one that has gone.
    """

    def __init__(self, events: LoaderEvents, evaluates: Callable[[], bool] = bool) -> None:
        """`evaluates`: whether all of the script's models are in eval mode, and it does not train in that mode."""
        self._events = events
        self._evaluates = evaluates
        self._kept: list[_Kept] = []
        self._gives_kept = False
        self._sizes: Sequence[int] = ()
        self._workers = 0
        self._memory = ""
        self._device: torch.device | str = "cpu"
        self._gave_copy = False
        self._served: weakref.WeakSet[Any] = weakref.WeakSet()
        """Iterators in whose present pass kept batches were given: they have more left than the pass may still give."""
        self._step, self._in_step = -1, 0  # batches of streams that were given in that step of the optimizer
        self._busy = False
        self.rank = int(started_with("RANK", "0"))
        # Some scripts read their loader in another thread, which is never waited for here.
        self._trains = TrainingThread()
        self.watch = False
        """Whether the events are wanted."""
        self.keep = False
        """Whether batches that the script is given are kept."""
        self.given = 0
        self.prefetched = 0
        """Batches that may wait in the loader's queues, at most; known whether or not events are wanted."""
        self.workers = 0
        """Worker processes of the script's own loaders; of several loaders, of the one with the most."""
        self.indexed = True
        """Whether all data sets are read by indices, and none as a stream."""
        self.persistent = False
        """Whether the workers of some loader stay for the next epoch."""
        self._gradients_wanted = False
        self._trained_with: list[weakref.ref[Any]] = []
        """The data sets that were read while a model was in training mode."""

    def install(self) -> None:
        """Patch the classes in place."""
        _BaseDataLoaderIter.__next__ = self._wrapped(_BaseDataLoaderIter.__next__, self._next)  # type: ignore[method-assign]
        DataLoader.__iter__ = self._wrapped(DataLoader.__iter__, self._iter)  # type: ignore[method-assign]
        draw = _BaseDataLoaderIter._next_index

        @functools.wraps(draw)
        def drawing(iterator: Any) -> Any:
            index = draw(iterator)  # type: ignore[no-untyped-call]
            if self.keep and self._trains and not isinstance(iterator._dataset, IterableDataset):
                with contextlib.suppress(Exception):  # an index of the script's own may refuse to be copied
                    self._kept_of(iterator).drawn(index)
            return index

        _BaseDataLoaderIter._next_index = drawing  # type: ignore[method-assign]

    def give_kept(
        self,
        on: bool,
        sizes: Sequence[int] = (),
        workers: int = 0,
        memory: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        """From the next batch on, give copies of kept batches; or what the loader gives, which goes on where it was.

        With `sizes`, those whose sizes are nearest to these numbers of elements, in this order again and again.
        With `workers`, so many processes load samples of the same data set, as the script's own would. If they fail,
        copies are given, and `gave` is 0. With `memory`, the copies lie there; `device` is the model's.
        """
        if sizes != self._sizes:
            for kept in self._kept:
                kept.place_in_sizes = 0  # on all ranks
        self._gives_kept, self._sizes, self._workers = on, sizes, workers
        self._memory, self._device = memory, device
        self.given, self._gave_copy = 0, False
        if not on:
            for kept in self._kept:
                kept.leave()

    @property
    def gave(self) -> int:
        """Batches given as `give_kept` was asked for; 0 where one of them was not from workers or memory asked for."""
        full = any(kept.no_room and kept.moved_to == self._memory for kept in self._kept)
        return 0 if (self._workers and self._gave_copy) or (self._memory and full) else self.given

    @property
    def stored(self) -> tuple[int, ...]:
        """Elements of each batch that is kept, of the loader that gave most; empty where none are."""
        kept = max(self._kept, key=lambda one: len(one.batches), default=None)
        return tuple(kept.sizes) if kept is not None else ()

    def forget(self) -> None:
        """Free the kept batches."""
        for kept in self._kept:
            kept.end_workers()
        self._kept.clear()

    def _wrapped(self, function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def patched(of: Any, *args: Any, **kwargs: Any) -> Any:
            # A loader may be read inside another one's, as a wrapper does: only the outer one is the script's.
            if self._busy or not self._trains or self._validates(of):
                return function(of, *args, **kwargs)
            self.prefetched = max(self.prefetched, _queue_of(of))
            if not (self.watch or self.keep or self._gives_kept or self._served):
                return function(of, *args, **kwargs)
            self._busy = True
            self._events.wait_begins()
            try:
                return wrapper(function, of, *args, **kwargs)
            finally:
                self._events.wait_ends()
                self._busy = False

        return patched

    def _validates(self, of: Any) -> bool:
        """Whether the script reads for a validation: without gradients, though it reads other batches with them.

        Many scripts switch gradients off only in the body of the loop over batches. Their model is in eval mode before.
        """
        wanted = torch.is_grad_enabled() and not self._is_for_evaluation(of)
        self._gradients_wanted |= wanted
        return self._gradients_wanted and not wanted

    def _is_for_evaluation(self, of: Any) -> bool:
        """Whether the models are in eval mode now, and this data set was never read while one was not.

        Behind an evaluation some scripts change the mode back only when they have the next batch to train with.
        """
        data_set = of.dataset if isinstance(of, DataLoader) else of._dataset
        try:
            reference = weakref.ref(data_set)
        except TypeError:  # a list, say: it is not known again
            return False
        self._trained_with = [one for one in self._trained_with if one() is not None]
        if any(one() is data_set for one in self._trained_with):
            return False
        if self._evaluates():
            return True
        self._trained_with.append(reference)
        return False

    def _iter(self, iterate: Callable[..., Any], loader: Any) -> Any:
        self._events.iterator_made()
        return iterate(loader)

    def _next(self, following: Callable[..., Any], iterator: Any) -> Any:
        kept = self._kept_of(iterator)
        # A validation goes on with its own batches.
        instead = self._gives_kept and bool(kept.batches) and torch.is_grad_enabled()
        self._end_pass_as_written(iterator, instead)
        was_ready = False
        if instead:
            batch = self._instead(kept, iterator)
            iterator._num_yielded += 1
        else:
            waiting_before, is_there = _in_hand(iterator), _has_come(iterator)
            batch = following(iterator)
            # One that came out of its turn was taken first, and kept: then the one that was asked for came later.
            was_ready = is_there and _in_hand(iterator) <= waiting_before
        samples, elements, size = _measures(batch)
        if self.keep and not self._gives_kept and not kept.full:
            kept.add(batch, elements, size)
        self.workers = max(self.workers, iterator._num_workers)
        self.persistent |= iterator._persistent_workers
        self.indexed &= not isinstance(iterator._dataset, IterableDataset)
        self._events.gave(samples, elements, was_ready)
        return batch

    def _end_pass_as_written(self, iterator: Any, instead: bool) -> None:
        """StopIteration where a pass with kept batches in it has had as many batches as it has without them.

        Ranks may meet at the end of an epoch, and not all of them may be given kept batches. And a script may have
        room for so many losses, or a schedule for so many steps. How long a stream is, nobody knows: there a loop that
        reads all of it without a step, such as a validation, must come to an end.
        """
        if iterator._num_yielded == 0:  # also where an iterator is used for one pass after another
            self._served.discard(iterator)
        if not instead and iterator not in self._served:
            return
        length = _length(iterator)
        if length is None:
            if self._events.optimizer_steps != self._step:
                self._step, self._in_step = self._events.optimizer_steps, 0
            self._in_step += instead
            if self._in_step > _MOST_IN_A_STEP:
                raise StopIteration
            return
        if iterator._num_yielded >= length:
            raise StopIteration
        self._served.add(iterator)

    def _instead(self, kept: _Kept, iterator: Any) -> Any:
        if self._workers and kept.indices and not kept.no_workers:
            try:
                if kept.loaded is None and not kept.has_room_for(self._workers):
                    raise MemoryError
                batch = kept.from_workers(iterator, self._workers)
            except Exception:  # the script's data set may raise any
                kept.no_workers = True
                kept.end_workers()
            else:
                self.given += 1
                return batch
        self._gave_copy = True
        self.given += 1
        return kept.following(self._sizes, self.rank, self._memory, self._device)

    def _kept_of(self, iterator: Any) -> _Kept:
        data_set, kind = iterator._dataset, _kind_of(iterator)
        found = next((kept for kept in self._kept if kept.data_set() is data_set), None)
        if found is None:
            gone = (kept for kept in self._kept if kept.data_set() is None and kept.kind == kind)
            found = next(gone, None)
            if found is None:
                found = _Kept(_reference(data_set), kind)
                self._kept.append(found)
            found.data_set = _reference(data_set)
        return found


def _let_die_in_silence(iterator: Any) -> None:
    """Let the workers of our own iterator die without an exception in the script's main thread, wherever that is.

    `next` finds out within `_PATIENCE`. Without this, even one that we end raises where it has only just begun.
    """
    if iterator._worker_pids_set:
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def _queue_of(loader: Any) -> int:
    """Batches that may wait in the queues of a loader, or of an iterator of one."""
    if isinstance(loader, DataLoader):
        workers, ahead = getattr(loader, "num_workers", 0), getattr(loader, "prefetch_factor", 0)
    else:
        workers, ahead = loader._num_workers, getattr(loader, "_prefetch_factor", 0)
    return int((workers or 0) * (ahead or 0))


def _in_hand(iterator: Any) -> int:
    """Batches of worker processes that were taken before their turn."""
    return sum(len(one) == 2 for one in getattr(iterator, "_task_info", {}).values())


def _has_come(iterator: Any) -> bool:
    """Whether a batch of worker processes can be taken without waiting: what is left to do is to take it over."""
    if not iterator._num_workers:
        return False
    queue, tasks = getattr(iterator, "_data_queue", None), getattr(iterator, "_task_info", {})
    if len(tasks.get(getattr(iterator, "_rcvd_idx", -1), ())) == 2:
        return True
    try:
        return queue is not None and not queue.empty()
    except (OSError, ValueError):  # it is closed: the workers have ended
        return False


def _length(iterator: Any) -> int | None:
    """Batches of one pass over the loader; None where that is not known."""
    try:
        return len(iterator)
    except Exception:  # a sampler of the script's own may raise any
        return None


def _size_of(data_set: Any) -> int:
    """Samples; 0 where the data set has no length."""
    try:
        return len(data_set)
    except TypeError:
        return 0


def _others(indices: Sequence[Any], length: int) -> Iterator[Any]:
    """Batches like these without end, of other samples each time.

    What the script has just read may still lie in memory, and would be loaded faster than what comes next. Where
    indices are no numbers, or the data set has no length (0), the same samples come again.
    """
    shift = step = sum(len(one) if isinstance(one, list) else 1 for one in indices)
    while True:
        for one in indices:
            yield _shifted(one, shift, length) if length else one
        shift += step


def _shifted(index: Any, shift: int, length: int) -> Any:
    if isinstance(index, list):
        return [_shifted(one, shift, length) for one in index]
    return (index + shift) % length if isinstance(index, int) else index


def _kind_of(iterator: Any) -> object:
    """What two loaders of the same data have in common."""
    batch = getattr(iterator._index_sampler, "batch_size", None)
    return type(iterator._dataset), getattr(iterator._collate_fn, "__qualname__", ""), batch


def _reference(data_set: Any) -> Callable[[], Any]:
    """A weak one where that is possible: a list, say, has none, and stays alive until the kept batches are freed."""
    try:
        return weakref.ref(data_set)
    except TypeError:
        return lambda: data_set


def _copied(batch: Any) -> Any:
    """A batch that shares no memory with `batch`; pinned where that is."""
    known = {id(t): t.clone().pin_memory() if t.is_pinned() else t.clone() for t in _tensors_of(batch)}
    return copy.deepcopy(batch, known)


def _moved(batch: Any, memory: str, device: torch.device | str) -> Any:
    """The batch in that memory. RuntimeError where it is full."""
    known = {id(t): t.pin_memory() if memory == PINNED else t.to(device) for t in _tensors_of(batch)}
    return copy.deepcopy(batch, known)


def _measures(batch: Any) -> tuple[int, int, int]:
    """Samples (the first dimension of the first tensor or array), numbers, and bytes of a batch.

    All are 0 where a batch does not tell, as a nested tensor has no dimensions.
    """
    try:
        arrays = _arrays_of(batch)
        samples = next((int(one.shape[0]) for one in arrays if len(one.shape)), len(arrays))
        return samples, sum(math.prod(one.shape) for one in arrays), sum(one.nbytes for one in arrays)
    except Exception:  # whatever the script puts into a batch, only the script uses it
        return 0, 0, 0


def _tensors_of(batch: Any) -> list[torch.Tensor]:
    return [one for one in _arrays_of(batch) if isinstance(one, torch.Tensor)]


def _arrays_of(batch: Any) -> list[Any]:
    """The tensors of a batch, and what has a shape as NumPy's arrays have.

    It does not matter what the batch is made of: an object of the script's own class is as good as a dict.
    """
    found: list[Any] = []
    parts, seen = deque([batch]), dict[int, Any]()  # alive, so that no other object gets the same id
    for _ in range(_MOST_PARTS):
        if not parts:
            break
        one = parts.popleft()
        if isinstance(one, _PLAIN) or id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor) or (hasattr(one, "shape") and hasattr(one, "nbytes")):
            found.append(one)
        else:
            parts.extend(_parts_of(one))
    return found


_PLAIN = (str, bytes, int, float, complex, type(None), type)


def _parts_of(one: Any) -> Iterable[Any]:
    if isinstance(one, dict | list | tuple):
        return parts_of(one)
    named = getattr(one, "__dict__", {})
    if named:
        return named.values()
    return (field_of(one, name) for kind in type(one).__mro__ for name in vars(kind).get("__slots__", ()))
