"""Does again what a script's ranks have done with their groups, on data of our own, as written and with a change.

    python -m autoddp.worker.bench.replay PLAN RESULT       # both JSON, see `wire.replayed_calls`

It runs when the script has ended: its processes are gone, so nothing of this can mix with its calls. One process
imports torch and forks a process for each rank, which takes a second in all. Programs take turns (A B B A …), so what
else the machine does meets all of them. One start of the same processes differs from the next by more than its rounds
do, as the starts of the script. So ranks are started several times, and do a part of the rounds each time. A rank that
waits for too long ends, and the others with it.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from autoddp import codec
from autoddp.network.loopback import ADDRESS, store_on_loopback
from autoddp.timing import difference
from autoddp.wire.replayed_calls import (
    CALLS,
    DESTROY_GROUP,
    MAKE_GROUP,
    OBJECTS,
    REST,
    WAIT,
    Act,
    Program,
    Replay,
    Replayed,
)

_PATIENCE = timedelta(seconds=20)  # for one call
_FEWEST, _MOST = 3, 40  # rounds
_FEWEST_TO_KNOW = 6  # rounds, before which an interval may be narrow by chance
_WELL_ENOUGH = 0.05  # of a price, to both sides
_WORTHWHILE = 0.03  # of the steps as written, from which a gain is worth more rounds
_UNDECIDED = 2.0  # times the seconds of the plan that all starts may take together, where a gain may be none
_MOST_UNDECIDED = 16.0  # seconds then at most, unless the plan itself allows more
_STARTS = 4  # of the ranks at least, among which the rounds are divided
_A_START = 2.0  # seconds of rounds at most, and then the ranks are started anew
_OF_A_START = 10  # rounds at most
_OVERHEAD = 3e-6  # seconds of this file's own between two calls; the script's Python, and torch's, is in its gaps
_CALLS_TO_KNOW = 20  # of a kind, of which the quickest counts
_SLEEPS = 1e-4  # shorter than this the kernel does not sleep
_MOST_TURNS = 100  # of computing and sleeping in one gap


def main() -> None:
    """Start the ranks until enough is known, and write their times; exit code 1 if one of them fails.

    All end with the launcher.
    """
    _end_with(os.getppid())
    plan = codec.decode(Path(sys.argv[1]).read_text(encoding="utf-8"), Replay)
    result = Path(sys.argv[2])
    torch.set_num_threads(1)  # no thread may be there before the forks
    found = Replayed(dict.fromkeys(plan.programs, ()), dict.fromkeys(plan.programs, (0.0,) * plan.ranks))
    began = time.monotonic()
    for starts in itertools.count(1):
        if not _start(plan, found, result):
            sys.exit(1)
        found = codec.decode(result.read_text(encoding="utf-8"), Replayed)
        is_over = time.monotonic() - began >= _longest(plan, found) or _rounds(found) >= _MOST
        # Rounds of one start may agree well, and differ from those of the next one.
        if is_over or (starts > 1 and _is_known(found.seconds)):
            break


def _rounds(found: Replayed) -> int:
    return len(next(iter(found.seconds.values())))


def _longest(plan: Replay, found: Replayed) -> float:
    """Seconds that all starts may take together; the first one makes `_FEWEST` rounds in any case."""
    if _are_decided(found.seconds):
        return plan.seconds
    return max(plan.seconds, min(_UNDECIDED * plan.seconds, _MOST_UNDECIDED))


def _start(plan: Replay, found: Replayed, result: Path) -> bool:
    """Fork the ranks, which add their rounds to what was found and write it; whether none of them has failed."""
    # Its own store: another program's time-outs and keys stay away from it.
    reads, writes = os.pipe()
    own = os.getpid()
    store = os.fork()
    if store == 0:
        _end_after(lambda: _serve(own, writes))
    os.close(writes)
    with os.fdopen(reads) as pipe:
        port = int(pipe.readline())
    children: dict[int, int] = {}
    ended: set[int] = set()
    for rank in range(plan.ranks):
        pid = os.fork()
        if pid == 0:
            _end_after(lambda: _rank(own, plan, found, rank, port, result))  # noqa: B023 - called at once
        children[pid] = rank
    failed = False
    while children:
        pid, status = os.wait()
        children.pop(pid, None)
        ended.add(pid)
        if (status or pid == store) and not failed:
            failed = True
            for other in children:
                os.kill(other, signal.SIGKILL)
    if store not in ended:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
    return not failed


def _serve(parent: int, pipe: int) -> None:
    """Keep a store as torchrun's agent does, and write its port: ranks that make groups wait for it."""
    _end_with(parent)
    store = store_on_loopback()
    os.write(pipe, f"{store.port}\n".encode())
    os.close(pipe)
    signal.pause()


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        from autoddp.isolation.kernel.syscalls import die_with_parent, leave_no_core_files

        die_with_parent(signal.SIGKILL, parent)
        leave_no_core_files()


def _end_after(work: Callable[[], None]) -> None:
    """Call `work`, then end this process at once, without the functions that its parent has registered for the end."""
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:
        print(f"replay: {error!r}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _rank(parent: int, plan: Replay, found: Replayed, rank: int, port: int, result: Path) -> None:
    _end_with(parent)
    if sys.platform == "linux":
        # As torchrun's ranks: the kernel shares cores between sessions first (autogroups), then among the threads of
        # each. In one session small calls of four ranks on two cores took a third longer.
        os.setsid()
    torch.set_num_threads(plan.threads)
    if plan.backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = TCPStore(ADDRESS, port, wait_for_workers=False)
    dist.init_process_group(plan.backend, store=store, rank=rank, world_size=plan.ranks, timeout=_PATIENCE)
    device = torch.device("cuda", torch.cuda.current_device()) if plan.backend == "nccl" else torch.device("cpu")
    late, with_a_call = _late(), _with_a_call(device)
    runs = {name: _Run(program, rank, device, late, with_a_call) for name, program in plan.programs.items()}
    for run in runs.values():  # connects: for that no rank has to compute
        run.once(with_gaps=False)
        run.in_calls = 0.0
    names, before = list(runs), _rounds(found)
    seconds = {name: [*of_it] for name, of_it in found.seconds.items()}
    began, number = time.monotonic(), 0
    while True:
        for name in names if (before + number) % 2 == 0 else reversed(names):  # a start may have one round only
            dist.barrier()
            seconds[name].append(_of_all(runs[name].once(), plan.programs[name], rank, device))
        number += 1
        is_over = number >= _OF_A_START or time.monotonic() - began >= min(_A_START, plan.seconds / _STARTS)
        goes_on = torch.tensor([int(before + number < _FEWEST or not (is_over or _is_known(seconds)))], device=device)
        dist.broadcast(goes_on, src=0)
        if not int(goes_on):
            break
    in_calls = torch.tensor([run.in_calls / number for run in runs.values()], device=device)
    of_ranks = [torch.zeros_like(in_calls) for _ in range(plan.ranks)]
    dist.all_gather(of_ranks, in_calls)
    dist.barrier()  # with NCCL the call before returns while it is at work, and a rank that ends would end it
    if rank == 0:
        stood = dict(zip(names, zip(*(of_rank.tolist() for of_rank in of_ranks), strict=True), strict=True))
        share = number / (before + number)
        means = {
            name: tuple(then + share * (now - then) for then, now in zip(found.in_calls[name], of_it, strict=True))
            for name, of_it in stood.items()
        }
        rounds = {name: tuple(of_it) for name, of_it in seconds.items()}
        result.write_text(codec.encode(Replayed(rounds, means)), encoding="utf-8")


def _of_all(took: float, program: Program, rank: int, device: torch.device) -> float:
    """Seconds of a round, see `Program.of_each`. `took`: those of this rank."""
    if not program.of_each:
        longest = torch.tensor([took], dtype=torch.float64, device=device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)
    takes_part = bool(program.acts[rank])
    both = torch.tensor([took * takes_part, takes_part], dtype=torch.float64, device=device)
    dist.all_reduce(both)
    return float(both[0] / both[1].clamp_min(1))  # a change may leave nothing to do


def _is_known(seconds: Mapping[str, Sequence[float]]) -> bool:
    """Whether the rounds tell well enough what each change gives, beside the first program."""
    as_written, *changed = seconds.values()
    if len(as_written) < _FEWEST_TO_KNOW:
        return False
    gains = [difference(as_written, of_it) for of_it in changed]
    return all(one.high - one.low <= 2 * _WELL_ENOUGH * abs(one.seconds) for one in gains)


def _are_decided(seconds: Mapping[str, Sequence[float]]) -> bool:
    """Whether each change is known to give something, or gives next to nothing."""
    as_written, *changed = seconds.values()
    if len(as_written) < _FEWEST:
        return True
    gains = [difference(as_written, of_it) for of_it in changed]
    return all(one.low > 0 or one.seconds < _WORTHWHILE * sum(as_written) / len(as_written) for one in gains)


def _late() -> float:
    """Seconds for which the kernel sleeps longer than it is told to. The script's gaps have them already."""
    found = []
    for _ in range(10):
        began = time.perf_counter()
        time.sleep(1e-3)
        found.append(time.perf_counter() - began - 1e-3)
    return max(0.0, min(found))


def _with_a_call(device: torch.device) -> float:
    """Seconds of CPU time that come with each call of a script: torch's own Python, and an operator on the result."""
    number, group = torch.zeros(1, device=device), dist.group.WORLD
    assert group is not None

    def as_scripts_do() -> None:
        dist.all_reduce(number)
        number.div_(1.0)

    def of_the_group() -> None:
        group.allreduce([number]).wait()

    least = {}
    for call in (as_scripts_do, of_the_group):
        took = []
        for _ in range(_CALLS_TO_KNOW):
            began = time.thread_time()
            call()
            took.append(time.thread_time() - began)
        least[call] = min(took)
    return max(0.0, least[as_scripts_do] - least[of_the_group])


class _Run:
    """One program on one rank."""

    def __init__(
        self, program: Program, rank: int, device: torch.device, late: float = 0.0, with_a_call: float = 0.0
    ) -> None:
        self._rank, self._ranks, self._device = rank, program.groups, device
        named = program.backends or ("",) * len(program.groups)
        self._backends = [backend if dist.is_backend_available(backend) else "" for backend in named]
        self._groups: list[Any] = [self._new_group(place) for place in range(len(program.groups))]
        self._acts = program.acts[rank]
        self._late, self._with_a_call = late, with_a_call
        self._pause = program.pauses[rank] if program.pauses else 0.0
        self._data: dict[tuple[str, int, int, str, str, int, bool, int], _Data] = {}
        self._wholes: dict[tuple[str, int, int, str, str], torch.Tensor] = {}
        self._pending: dict[int, Any] = {}  # by the place of the act that has started it
        self._left: dict[int, list[Any]] = defaultdict(list)
        """Place → the groups that others have taken the place of in this round; None for those that were destroyed."""
        self.in_calls = 0.0
        """Seconds that this rank has stood in calls so far, and in waits for their ends."""
        for act in self._acts:
            if act.call in CALLS | OBJECTS:
                self._data_of(act)

    def _new_group(self, place: int) -> Any:
        """A group, or None where it has no ranks; all ranks call this, as torch demands."""
        ranks, backend = self._ranks[place], self._backends[place] or None
        return dist.new_group(list(ranks), timeout=_PATIENCE, backend=backend) if ranks else None

    def once(self, with_gaps: bool = True) -> float:
        """Do all acts; the seconds that they took."""
        began = time.perf_counter()
        for number, act in enumerate(self._acts):
            if with_gaps:
                self._gap(act)
            called = time.perf_counter()
            self._do(act, number)
            self.in_calls += time.perf_counter() - called
        called = time.perf_counter()
        self._wait()
        self.in_calls += time.perf_counter() - called
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        took = time.perf_counter() - began
        self._destroy_those_left()
        return took

    def _do(self, act: Act, number: int) -> None:
        """Do what comes behind the gap. `number`: the place of the act."""
        if act.call == WAIT:
            self._wait(number - act.after if act.after else None)
        elif act.call == MAKE_GROUP:
            self._left[act.group].append(self._groups[act.group])
            self._groups[act.group] = self._new_group(act.group)
        elif act.call == DESTROY_GROUP:
            since = act.made_since
            groups, at = (self._left[act.group], -since) if since else (self._groups, act.group)
            dist.destroy_process_group(groups[at])
            groups[at] = None
        elif act.call != REST:
            self._call(act, number)

    def _gap(self, act: Act) -> None:
        """Compute and sleep in turns, as the script: ranks that share cores compute there while others sleep.

        If all computed first, as they leave a call together, each would have to wait for all others.
        """
        turns = 1
        if self._pause > 0:
            turns = max(1, min(round(act.sleeps / self._pause), int(act.sleeps / (2 * _SLEEPS)), _MOST_TURNS))
        goes = _OVERHEAD + act.left_out * self._with_a_call
        computes, sleeps = max(0.0, act.computes - goes) / turns, act.sleeps / turns - self._late
        clock = time.thread_time
        for _ in range(turns):
            until = clock() + computes
            while clock() < until:
                pass
            if sleeps > _SLEEPS - self._late:
                time.sleep(max(0.0, sleeps))

    def _wait(self, of: int | None = None) -> None:
        """For the end of the call that the act at that place has started; without one, of all that are not over."""
        for number in [*self._pending] if of is None else [of]:
            if (work := self._pending.pop(number, None)) is not None:
                work.wait()

    def _destroy_those_left(self) -> None:
        """Destroy the groups that others have taken the places of: rounds must not become slower by them."""
        for group in itertools.chain(*self._left.values()):
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
        self._left.clear()

    def _call(self, act: Act, number: int) -> None:
        ranks, data = self._ranks[act.group], self._data_of(act)
        # The last group may be destroyed before others.
        group = self._groups[act.group] or next(one for one in reversed(self._left[act.group]) if one is not None)
        if act.call in OBJECTS:
            _OBJECTS[act.call](data.thing, len(ranks), ranks[max(0, act.root)], group)
            return
        if data.parts:
            torch.cat(data.parts, out=data.whole)
        if "barrier" in act.call:
            work = dist.barrier(group=group, async_op=not act.waits)
        else:
            work = getattr(group, _ALSO_CALLED.get(act.call, act.call))(*data.arguments)
        if work is not None and act.waits:  # with NCCL a call that nobody has to wait for may return nothing
            work.wait()
        elif work is not None:
            self._pending[number] = work
        if data.parts and act.waits:
            for part, piece in zip(data.parts, data.whole.split(data.sizes), strict=True):
                part.copy_(piece)

    def _data_of(self, act: Act) -> _Data:
        """The data of an act, made once. They are zeros: the time does not depend on the values."""
        key = (act.call, act.bytes, act.group, act.dtype, act.device, act.tensors, act.waits, act.root)
        if key not in self._data:
            ranks = self._ranks[act.group]
            on_host = act.device == "cpu" and self._backends[act.group]
            device = torch.device("cpu") if on_host else self._device
            data = _data(act, len(ranks), ranks.index(self._rank), device, self._wholes.get(key[:5]))
            self._wholes[key[:5]] = data.whole
            self._data[key] = data
        return self._data[key]


@dataclass
class _Data:
    """What an act sends and receives."""

    whole: torch.Tensor
    """What this rank gives to a method of a group."""
    arguments: tuple[Any, ...] = ()
    """What the method is called with."""
    thing: Any = None
    """What it gives to a function for objects."""
    parts: list[torch.Tensor] = field(default_factory=list)
    """From which it is gathered, and to which it is put back; none where the script has one tensor."""
    sizes: list[int] = field(default_factory=list)
    """Numbers of each part."""


def _data(act: Act, ranks: int, place: int, device: torch.device, whole: torch.Tensor | None) -> _Data:
    """The data of an act. `place`: that of this rank among the ranks of the group.

    `whole`: that of an act which differs in its root alone, or in whether it waits: a script that sends by turns from
    each rank would else need as much for each of them.
    """
    if act.call in OBJECTS:
        return _Data(torch.empty(0), thing={"loss": 0.5, "filler": "x" * max(0, act.bytes - 48)})
    # As many elements as in the script: a ring of four ranks sends one number in fewer messages than four numbers.
    dtype = _OF_SIZE.get(getattr(torch, act.dtype or "float32").itemsize, torch.float64)
    count = max(1, act.tensors, -(-act.bytes // dtype.itemsize))
    if _ALSO_CALLED.get(act.call, act.call) in _CUTS:
        count += -count % ranks
    whole = torch.zeros(count, dtype=dtype, device=device) if whole is None else whole
    sizes = [count // act.tensors] * act.tensors
    sizes[-1] += count - sum(sizes)
    parts = [torch.zeros(size, dtype=dtype, device=device) for size in sizes] if act.tensors > 1 else []
    arguments = _arguments(act, whole, ranks, is_root=place == max(0, act.root))
    return _Data(whole, arguments, parts=parts, sizes=sizes)


def _arguments(act: Act, whole: torch.Tensor, ranks: int, is_root: bool) -> tuple[Any, ...]:
    """What a method of `ProcessGroup` is called with, as the functions of torch.distributed call it."""

    def of_all() -> torch.Tensor:
        return whole.new_zeros(len(whole) * ranks)

    def pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(tensor.chunk(ranks))

    def with_options(name: str, *tensors: Any) -> tuple[Any, ...]:
        options = getattr(dist.distributed_c10d, name)()
        if hasattr(options, "asyncOp"):
            options.asyncOp = not act.waits
        if hasattr(options, "rootRank"):
            options.rootRank = max(0, act.root)
        return (*tensors, options)

    match _ALSO_CALLED.get(act.call, act.call):
        case "allreduce":
            return with_options("AllreduceOptions", [whole])
        case "reduce":
            return with_options("ReduceOptions", [whole])
        case "broadcast":
            return with_options("BroadcastOptions", [whole])
        case "allgather":
            return with_options("AllgatherOptions", [pieces(of_all())], [whole])
        case "_allgather_base":
            return with_options("AllgatherOptions", of_all(), whole)
        case "reduce_scatter":
            return with_options("ReduceScatterOptions", [whole.new_zeros(len(whole) // ranks)], [pieces(whole)])
        case "_reduce_scatter_base":
            return with_options("ReduceScatterOptions", whole.new_zeros(len(whole) // ranks), whole)
        case "alltoall":
            return with_options("AllToAllOptions", pieces(torch.empty_like(whole)), pieces(whole))
        case "alltoall_base":
            return with_options("AllToAllOptions", torch.empty_like(whole), whole, [], [])
        case "gather":
            return with_options("GatherOptions", [pieces(of_all())] if is_root else [], [whole])
        case "scatter":
            return with_options("ScatterOptions", [whole], [pieces(of_all())] if is_root else [])
    return ()  # a barrier


_ALSO_CALLED = {
    "allreduce_coalesced": "allreduce",
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Methods of a group that do the same as another one, which every version of torch has."""
_CUTS = ("reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base")
"""Methods that give each rank a part of the data, all of one size."""
_OF_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}
"""Bytes of an element → a type that every backend can add up; larger ones count as several."""
_OBJECTS: dict[str, Callable[[Any, int, int, Any], Any]] = {
    "all_gather_object": lambda thing, ranks, first, group: dist.all_gather_object([None] * ranks, thing, group=group),
    "broadcast_object_list": lambda thing, ranks, first, group: dist.broadcast_object_list(
        [thing], src=first, group=group
    ),
    "gather_object": lambda thing, ranks, first, group: dist.gather_object(
        thing, [None] * ranks if dist.get_rank() == first else None, dst=first, group=group
    ),
    "scatter_object_list": lambda thing, ranks, first, group: dist.scatter_object_list(
        [None], [thing] * ranks if dist.get_rank() == first else None, src=first, group=group
    ),
}

if __name__ == "__main__":
    main()
