"""Claim: recording costs a script without DDP at most 3 µs for each collective call.

    python benchmarks/recording_cost.py --json recording_cost.json       # on a quiet machine: three minutes

`all_reduce` of four numbers over torch's fake backend, which moves nothing, in processes with and without the recorder
of `autoddp diagnose`; they alternate (AB BA …). What a call takes longer with it is its cost, from the third
second on, when the recorder looks at waits for a core in one second of eight.

at once     calls follow each other
later       a call comes 60 µs after the one before; the CPU time of the thread is read then, too
other work  a call comes after a training step of a small network, as in a script: what a call needs, and what recording
            needs, has left the caches of the core by then
"""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
import time
from collections.abc import Callable

from common import median, options, paired, table, verdict, write_json

TARGET = 3e-3  # seconds of a thousand calls
_THOUSAND = 1_000
AT_ONCE, LATER, OTHER_WORK = "at once", "later", "other work"
_GAP = 60e-6  # seconds


def of_a_thousand(recorded: bool, kind: str, lasts: float, left_out: float) -> float:
    """Mean seconds of a thousand calls without what lies between them, in a process of its own, behind its start."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return float(pool.apply(_calls, (recorded, kind, lasts, left_out)))


def _calls(recorded: bool, kind: str, lasts: float, left_out: float) -> float:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from autoddp.wire.recorded_calls import RecordingPlan
    from autoddp.worker.observe.call_recorder import CallRecorder
    from autoddp.worker.observe.collectives import collectives

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    numbers, clock = torch.zeros(4), time.perf_counter
    torch.set_num_threads(1)
    network = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    optimizer, batch = torch.optim.SGD(network.parameters(), lr=1e-3), torch.randn(8, 64)

    def between() -> None:
        if kind == OTHER_WORK:
            optimizer.zero_grad()
            network(batch).square().mean().backward()
            optimizer.step()
        elif kind == LATER:
            until = clock() + _GAP
            while clock() < until:
                pass

    def one_call() -> float:
        between()
        began = clock()
        dist.all_reduce(numbers)
        return clock() - began

    with tempfile.TemporaryDirectory(prefix="recording-cost-") as folder:
        if recorded:
            collectives.record(CallRecorder(RecordingPlan(folder), is_launched=True))
        began, calls, seconds = clock(), 0, 0.0
        while (at := clock() - began) < lasts:
            took = one_call()
            if at >= left_out:
                calls, seconds = calls + 1, seconds + took
    return seconds / calls * _THOUSAND


def main() -> None:
    """Measure all kinds of calls, print them and write the figures."""
    parser = options(__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="of processes for each kind of call (3)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of calls in each process (8)")
    parser.add_argument("--left-out", type=float, default=2.0, help="seconds at the beginning that do not count (2)")
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.seconds, args.left_out = 1, 0.3, 0.1
    figures, rows = {}, []
    for kind in (AT_ONCE, LATER, OTHER_WORK):
        sides: dict[str, Callable[[], float]] = {
            side: functools.partial(of_a_thousand, recorded, kind, args.seconds + args.left_out, args.left_out)
            for side, recorded in (("as written", False), ("recorded", True))
        }
        figures[kind] = found = paired(sides, args.pairs)
        costs = [after - before for before, after in zip(found["as written"], found["recorded"], strict=True)]
        takes = median(found["as written"])
        each = ", ".join(f"{cost * 1e3:.2f}" for cost in costs)
        reached = verdict(median(costs) <= TARGET)
        rows.append((kind, f"{takes * 1e3:.2f}", f"{median(costs) * 1e3:.2f}", each, f"≤ {TARGET * 1e3:.0f}", reached))
    table(("calls", "µs as written", "µs more recorded", "of each pair", "target", "reached"), rows)
    write_json(args.json, {"seconds_of_a_thousand_calls": figures})


if __name__ == "__main__":
    main()
