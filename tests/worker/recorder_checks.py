"""What two gloo ranks call while their collectives are recorded, and the same without: the results must be the same."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from python_group import Call, PythonGroup, perform
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import _get_current_dispatch_mode

from autoddp import codec
from autoddp.diagnose.collectives import recorded
from autoddp.diagnose.collectives.table import table
from autoddp.wire.recorded_calls import TRIAL, WATCH, RecordingPlan, ThreadsTrial
from autoddp.worker.observe.call_recorder import CallRecorder
from autoddp.worker.observe.collectives import collectives

LATE = 0.02
LONG = 0.1  # seconds to either side of a first use: a busy machine may stand still for 300 ms


class OfOne(PythonGroup):
    """Overrides some methods of `ProcessGroup` and inherits others, as backends in Python do."""

    def collective(self, call: Call) -> dist.Work:
        perform([call])
        done: Any = torch.futures.Future()  # type: ignore[var-annotated]
        done.set_result(call.received)
        return torch._C._distributed_c10d._create_work_from_future(done)  # type: ignore[attr-defined,no-any-return]


def _calls(rank: int) -> list[Any]:
    """Each kind of call once or several times. What they return and change."""
    mean, many = torch.full((3,), rank + 0.1), [torch.full((2,), float(rank + n)) for n in range(3)]
    found: list[Any] = [mean, *many]
    found.append(dist.all_reduce(mean))
    sparse = torch.ones(3).to_sparse()
    dist.all_reduce(sparse)
    found.append(sparse.to_dense())
    work = dist.all_reduce(many[0], async_op=True)
    found += [type(work).__name__, work.wait(), work.is_completed()]
    for tensor in many[1:]:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    gathered = [torch.zeros(3), torch.zeros(3)]
    dist.all_gather(gathered, mean)
    group = dist.new_group([0, 1])
    dist.broadcast(many[2], 1, group=group)
    if rank == 1:
        time.sleep(LATE)
    dist.barrier(group=group)
    if rank == 0:
        dist.send(mean, 1)
    else:
        dist.recv(mean, 0)
    both = torch.zeros(6)
    dist.all_gather_into_tensor(both, mean)
    found += [both, objects, *gathered, group.allreduce([mean]).wait()]
    dist.destroy_process_group(group)
    try:
        dist.all_reduce("no tensor")  # type: ignore[arg-type]
    except TypeError as error:
        found.append(str(error))
    try:
        dist.get_backend_config()
        dist.distributed_c10d._get_default_group().allreduce()
    except TypeError as error:
        found.append(str(error).partition("(")[0])
    mine = OfOne(0, 1)
    found += [mine.allreduce([mean]).wait(), _inherited(mine)]
    return found


def _inherited(mine: PythonGroup) -> str:
    """A method that the subclass does not have: torch's says that there is no backend, and nothing calls itself."""
    try:
        mine.reduce([torch.ones(1)], dist.ReduceOptions())
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "reduced"


def checks(rank: int) -> dict[str, Any]:
    """The calls without and with a recorder, and what was recorded."""
    folder = Path(os.environ["RECORDED"])
    as_written = _calls(rank)
    recorder = CallRecorder(RecordingPlan(str(folder)), is_launched=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        collectives.record(recorder)
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    seen = _calls(rank)
    own = [Path(path) for path in opened if Path(path).parent == folder]
    child = os.fork()
    if child == 0:
        dist.distributed_c10d._get_default_group().rank()
        os._exit(int(recorder._shared is not None))  # a fork has a file of its own, once it calls something
    forked = os.waitpid(child, 0)[1]
    recorder.pause()
    dist.all_reduce(torch.ones(1))
    recorder.resume()
    for _ in range(5):
        if rank == 1:
            time.sleep(5 * LATE)  # far more than a call takes where both ranks wait for a core
        dist.all_reduce(torch.ones(1000))
    init_device_mesh("cpu", (2, 1))
    _used_later(recorder, folder)
    threads, made = _threads_in_turns(recorder, folder)
    recorder.on = False
    dist.barrier()
    (mine,) = (one for one in recorded(folder).processes if one.rank == rank)
    return {
        "uses": {
            place.line: (use.calls, round(use.share, 3), use.where)
            for (place, nth), use in mine.uses.items()
            if nth < 0
        },
        "opened": [path.suffix for path in own],
        "said": [str(one.message) for one in said],
        "threads": threads,
        "made": made,
        "wholes": [
            (one.place.line, one.began, one.ended, [c.began for c in mine.calls if _is_part(c, one)])
            for one in mine.calls
            if one.place.is_for_objects
        ],
        "groups": [one.place.line for one in mine.calls if one.place.method == "new_group"],
        "tried": len(mine.tried),
        "is_left": "tolist" in vars(torch.Tensor) or _get_current_dispatch_mode() is not None,
        "alike": [_plain(one) for one in as_written] == [_plain(one) for one in seen],
        "seen": [_plain(one) for one in seen],
        "forked": forked,
        "on": recorder._paused_at > 0,
        "rows": [row.plain() for row in table(recorded(folder))],
        "ranks": recorded(folder).ranks,
    }


def _is_part(call: Any, whole: Any) -> bool:
    return call.place.group is not None and call.place.line == whole.place.line


def _used_later(recorder: CallRecorder, folder: Path) -> None:
    """Results that are used at once, later under another name, past torch's dispatcher, and never."""
    flat, counts, never = torch.ones(1000), torch.ones(4), torch.ones(5)
    kept = []
    part = flat[:10]
    (folder / WATCH).touch()
    recorder._look_after = 0.0
    for _ in range(8):
        dist.all_reduce(flat)
        flat.view(10, 100)
        time.sleep(LATE / 2)
        dist.barrier()
        time.sleep(LONG)
        part.add_(0.5)
        time.sleep(LONG)
        dist.all_reduce(counts)
        counts.tolist()
        time.sleep(LONG)
        dist.all_reduce(never)
        kept.append(never)  # no other tensor may get its memory
        never = torch.ones(5)


def _threads_in_turns(recorder: CallRecorder, folder: Path) -> tuple[list[int], int]:
    """The threads of this rank after each call, as often as they change; and how many calls there were."""
    dist.barrier()
    # Far longer than the rest: a busy machine may stand still for 300 ms, and each turn has to see some calls.
    trial = [ThreadsTrial(3, time.perf_counter() + LATE, 40 * LATE, 4)]
    dist.broadcast_object_list(trial)
    (folder / f"{TRIAL}.{dist.get_rank()}").write_text(codec.encode(trial[0]))
    (folder / f"{TRIAL}.{dist.get_rank()}").rename(folder / TRIAL)
    recorder._look_after = 0.0
    seen, made, goes_on = [torch.get_num_threads()], 0, torch.ones(1)
    while goes_on:  # until one of the ranks has seen enough
        goes_on = torch.ones(1) if time.perf_counter() < trial[0].ends + LATE else torch.zeros(1)
        dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
        made += 1
        if torch.get_num_threads() != seen[-1]:
            seen.append(torch.get_num_threads())
        time.sleep(LATE / 20)
    return seen, made


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
