"""Does again what a script's ranks have done with their groups, on data of our own, as written and with a change.

    python -m autoddp.worker.bench.replay PLAN RESULT       # both JSON, see `wire.replayed_calls`

It runs when the script has ended: its processes are gone, so nothing of this can mix with its calls. One process
imports torch and forks a process for each rank, which takes a second in all. Programs take turns (A B B A …), so what
else the machine does meets all of them. A rank that waits for too long ends, and the others with it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from autoddp import codec
from autoddp.network.loopback import ADDRESS, store_on_loopback
from autoddp.timing import difference
from autoddp.wire.replayed_calls import DESTROY_GROUP, MAKE_GROUP, OBJECTS, REST, WAIT, Act, Program, Replay, Replayed

_PATIENCE = timedelta(seconds=20)  # for one call
_FEWEST, _MOST = 3, 24  # rounds
_FEWEST_TO_KNOW = 6  # rounds, before which an interval may be narrow by chance
_WELL_ENOUGH = 0.05  # of a price, to both sides
_OVERHEAD = 3e-6  # seconds of this file's own between two calls; the script's Python is in its gaps
_SLEEPS = 1e-4  # shorter than this the kernel does not sleep
_MOST_TURNS = 100  # of computing and sleeping in one gap


def main() -> None:
    """Fork the ranks, and write their times; exit code 1 if one of them fails. All end with the launcher."""
    _end_with_parent()
    plan = codec.decode(Path(sys.argv[1]).read_text(encoding="utf-8"), Replay)
    result = Path(sys.argv[2])
    torch.set_num_threads(1)  # no thread may be there before the forks
    # Its own store: another program's time-outs and keys stay away from it.
    reads, writes = os.pipe()
    store = os.fork()
    if store == 0:
        _end_after(1, lambda: _serve(writes))
    os.close(writes)
    with os.fdopen(reads) as pipe:
        port = int(pipe.readline())
    children = {}
    for rank in range(plan.ranks):
        pid = os.fork()
        if pid == 0:
            _end_after(1, lambda: _rank(plan, rank, port, result))  # noqa: B023 - called at once
        children[pid] = rank
    failed = False
    while children:
        pid, status = os.wait()
        children.pop(pid, None)
        if (status or pid == store) and not failed:
            failed = True
            for other in children:
                os.kill(other, signal.SIGKILL)
    os.kill(store, signal.SIGKILL)
    sys.exit(int(failed))


def _serve(pipe: int) -> None:
    """Keep a store as torchrun's agent does, and write its port: ranks that make groups wait for it."""
    _end_with_parent()
    store = store_on_loopback()
    os.write(pipe, f"{store.port}\n".encode())
    os.close(pipe)
    signal.pause()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        from autoddp.isolation.syscalls import die_with_parent, leave_no_core_files

        die_with_parent(signal.SIGKILL)
        leave_no_core_files()


def _end_after(code: int, work: Callable[[], None]) -> None:
    """Call `work`, then end this process at once, without the functions that its parent has registered for the end."""
    try:
        work()
        code = 0
    except BaseException as error:
        print(f"replay: {error!r}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _rank(plan: Replay, rank: int, port: int, result: Path) -> None:
    _end_with_parent()
    torch.set_num_threads(plan.threads)
    if plan.backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = TCPStore(ADDRESS, port, wait_for_workers=False)
    dist.init_process_group(plan.backend, store=store, rank=rank, world_size=plan.ranks, timeout=_PATIENCE)
    device = torch.device("cuda", torch.cuda.current_device()) if plan.backend == "nccl" else torch.device("cpu")
    late = _late()
    runs = {name: _Run(program, rank, device, late) for name, program in plan.programs.items()}
    for run in runs.values():  # connects: for that no rank has to compute
        run.once(with_gaps=False)
        run.in_calls = 0.0
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    until, number = time.monotonic() + plan.seconds, 0
    while number < _MOST:
        for name in names if number % 2 == 0 else reversed(names):
            dist.barrier()
            took = torch.tensor([runs[name].once()], dtype=torch.float64, device=device)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(float(took))
        number += 1
        is_over = time.monotonic() >= until or _is_known(seconds, names)
        goes_on = torch.tensor([int(number < _FEWEST or not is_over)], device=device)
        dist.broadcast(goes_on, src=0)
        if not int(goes_on):
            break
    in_calls = torch.tensor([run.in_calls / number for run in runs.values()], device=device)
    of_ranks = [torch.zeros_like(in_calls) for _ in range(plan.ranks)]
    dist.all_gather(of_ranks, in_calls)
    dist.barrier()  # with NCCL the call before returns while it is at work, and a rank that ends would end it
    if rank == 0:
        rounds = {name: tuple(of_it) for name, of_it in seconds.items()}
        stood = dict(zip(names, zip(*(of_rank.tolist() for of_rank in of_ranks), strict=True), strict=True))
        text = codec.encode(Replayed(rounds, stood))
        result.write_text(text, encoding="utf-8")


def _is_known(seconds: dict[str, list[float]], names: list[str]) -> bool:
    """Whether the rounds tell well enough what each change gives, beside the first program."""
    if len(seconds[names[0]]) < _FEWEST_TO_KNOW:
        return False
    gains = [difference(seconds[names[0]], seconds[name]) for name in names[1:]]
    return all(one.high - one.low <= 2 * _WELL_ENOUGH * abs(one.seconds) for one in gains)


def _late() -> float:
    """Seconds for which the kernel sleeps longer than it is told to. The script's gaps have them already."""
    found = []
    for _ in range(10):
        began = time.perf_counter()
        time.sleep(1e-3)
        found.append(time.perf_counter() - began - 1e-3)
    return max(0.0, min(found))


class _Run:
    """One program on one rank."""

    def __init__(self, program: Program, rank: int, device: torch.device, late: float = 0.0) -> None:
        self._rank, self._ranks, self._device = rank, program.groups, device
        self._groups: list[Any] = [self._new_group(ranks) for ranks in program.groups]
        self._acts = program.acts[rank]
        self._late = late
        self._pause = program.pauses[rank] if program.pauses else 0.0
        self._data: dict[tuple[str, int, int, int], Any] = {}
        self._pending: dict[int, Any] = {}  # by the place of the act that has started it
        self._left: list[Any] = []
        self.in_calls = 0.0
        """Seconds that this rank has stood in calls so far, and in waits for their ends."""
        for act in self._acts:
            self._tensors(act)

    def _new_group(self, ranks: tuple[int, ...]) -> Any:
        """A group, or None where it has no ranks; all ranks call this, as torch demands."""
        return dist.new_group(list(ranks), timeout=_PATIENCE) if ranks else None

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
            self._left.append(self._groups[act.group])
            self._groups[act.group] = self._new_group(self._ranks[act.group])
        elif act.call == DESTROY_GROUP:
            dist.destroy_process_group(self._groups[act.group])
            self._groups[act.group] = None
        elif act.call != REST:
            self._call(act, number)

    def _gap(self, act: Act) -> None:
        """Compute and sleep in turns, as the script: ranks that share cores compute there while others sleep.

        If all computed first, as they leave a call together, each would have to wait for all others.
        """
        turns = 1
        if self._pause > 0:
            turns = max(1, min(round(act.sleeps / self._pause), int(act.sleeps / (2 * _SLEEPS)), _MOST_TURNS))
        computes, sleeps = max(0.0, act.computes - _OVERHEAD) / turns, act.sleeps / turns - self._late
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
        for group in self._left:
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
        self._left.clear()

    def _call(self, act: Act, number: int) -> None:
        group = self._groups[act.group]
        root = max(0, act.root)
        ranks = self._ranks[act.group][root:] + self._ranks[act.group][:root]  # the root first, see `_CALLS`
        if act.call in OBJECTS:
            _OBJECTS[act.call](self._tensors(act), len(ranks), ranks[0], group)
            return
        tensors = self._tensors(act)
        if act.tensors > 1:
            torch.cat(tensors["parts"], out=tensors["in"])
        work = _CALLS[act.call](tensors, ranks, group, not act.waits)
        if not act.waits and work is not None:
            self._pending[number] = work
        if act.tensors > 1 and act.waits:
            for part, piece in zip(tensors["parts"], tensors["in"].split(tensors["sizes"]), strict=True):
                part.copy_(piece)

    def _tensors(self, act: Act) -> Any:
        """The data of an act, made once. They are zeros: the time does not depend on the values."""
        key = (act.call, act.bytes, act.group, act.tensors)
        if key not in self._data:
            self._data[key] = self._made(act)
        return self._data[key]

    def _made(self, act: Act) -> Any:
        if act.call in OBJECTS:
            return {"loss": 0.5, "filler": "x" * max(0, act.bytes - 48)}
        ranks = len(self._ranks[act.group])
        count = max(ranks, -(-act.bytes // 4))
        count += -count % ranks
        whole = torch.zeros(count, device=self._device)
        small = torch.zeros(count // ranks, device=self._device)
        sizes = [count // act.tensors] * act.tensors
        sizes[-1] += count - sum(sizes)
        parts = [torch.zeros(size, device=self._device) for size in sizes] if act.tensors > 1 else []
        large = (
            torch.zeros(count * ranks, device=self._device) if "gather" in act.call or act.call == "scatter" else whole
        )
        return {"in": whole, "small": small, "large": large, "parts": parts, "sizes": sizes}


def _pieces(tensor: torch.Tensor, ranks: tuple[int, ...]) -> list[torch.Tensor]:
    return list(tensor.chunk(len(ranks)))


_CALLS: dict[str, Callable[[Any, tuple[int, ...], Any, bool], Any]] = {
    "allreduce": lambda t, ranks, group, later: dist.all_reduce(t["in"], group=group, async_op=later),
    "allreduce_coalesced": lambda t, ranks, group, later: dist.all_reduce(t["in"], group=group, async_op=later),
    "reduce": lambda t, ranks, group, later: dist.reduce(t["in"], ranks[0], group=group, async_op=later),
    "broadcast": lambda t, ranks, group, later: dist.broadcast(t["in"], ranks[0], group=group, async_op=later),
    "allgather": lambda t, ranks, group, later: dist.all_gather(
        _pieces(t["large"], ranks), t["in"], group=group, async_op=later
    ),
    "_allgather_base": lambda t, ranks, group, later: dist.all_gather_into_tensor(
        t["large"], t["in"], group=group, async_op=later
    ),
    "reduce_scatter": lambda t, ranks, group, later: dist.reduce_scatter(
        t["small"], _pieces(t["in"], ranks), group=group, async_op=later
    ),
    "_reduce_scatter_base": lambda t, ranks, group, later: dist.reduce_scatter_tensor(
        t["small"], t["in"], group=group, async_op=later
    ),
    "alltoall_base": lambda t, ranks, group, later: dist.all_to_all_single(
        torch.empty_like(t["in"]), t["in"], group=group, async_op=later
    ),
    "alltoall": lambda t, ranks, group, later: dist.all_to_all(
        _pieces(torch.empty_like(t["in"]), ranks), _pieces(t["in"], ranks), group=group, async_op=later
    ),
    "gather": lambda t, ranks, group, later: dist.gather(
        t["in"], _pieces(t["large"], ranks) if dist.get_rank() == ranks[0] else None, ranks[0], group, later
    ),
    "scatter": lambda t, ranks, group, later: dist.scatter(
        t["in"], _pieces(t["large"], ranks) if dist.get_rank() == ranks[0] else None, ranks[0], group, later
    ),
    "barrier": lambda t, ranks, group, later: dist.barrier(group=group, async_op=later),
    "monitored_barrier": lambda t, ranks, group, later: dist.barrier(group=group, async_op=later),
}
_CALLS |= {
    "all_gather_single": _CALLS["_allgather_base"],
    "reduce_scatter_single": _CALLS["_reduce_scatter_base"],
    "all_to_all_single": _CALLS["alltoall_base"],
}
"""Methods of a group → the same by torch's functions. Of those with a root the first rank of the group is the root."""
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
