"""Claim: moving gradients into float16's range costs no time: the fp16 hook is as fast as one that only rounds.

    python benchmarks/float16_scaling.py --json scaling.json           # two local gloo ranks: about a minute

Both hooks reduce the gradients of one model (24 MiB, buckets of 8 MiB) in alternate backward passes of one process, so
that both meet the same machine. "rounds" is the hook that this package had before: it divides, rounds, adds, looks for
infinite values and converts back. The ratio is that of the medians of blocks of passes, with its 99 % interval; also of
the processor time of a rank, on which other work on the machine weighs less.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import gain, median, options, table, write_json
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.worker.hooks import hook_for

RANKS, WIDTH, LAYERS, BATCH, CAP_MIB = 2, 1024, 6, 8, 8
WARMUP = 4  # steps of each model before the first block: DDP rebuilds its buckets after the first


class _Rounds:
    """State and hook of the side without scaling."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, _state: Any, bucket: Any) -> Any:  # DDP wants its own types or none
        buffer = bucket.buffer()
        narrow = buffer.div_(self.group.size()).to(torch.float16)
        work = dist.all_reduce(narrow, group=self.group, async_op=True)

        def widen(future: Any) -> torch.Tensor:
            arrived = future.value()[0]
            assert bool(arrived.sum(dtype=torch.float32).isfinite())
            widened: torch.Tensor = buffer.copy_(arrived)
            return widened

        return work.get_future().then(widen)


def _model() -> DDP:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return DDP(nn.Sequential(*layers), bucket_cap_mb=CAP_MIB)


def _rank(rank: int, blocks: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=100))
    plain, scaled = _model(), _model()
    rounds = _Rounds(plain.process_group)
    plain.register_comm_hook(None, lambda state, bucket: rounds(state, bucket))
    made = hook_for(Configuration({"hook": "fp16"}), scaled.process_group)
    assert made is not None
    scaled.register_comm_hook(*made)
    inputs = torch.randn(BATCH, WIDTH)

    def seconds(ddp: DDP) -> tuple[float, float]:
        ddp.zero_grad()
        loss = ddp(inputs).square().mean()
        dist.barrier()
        began = time.perf_counter(), time.process_time()
        loss.backward()
        return time.perf_counter() - began[0], time.process_time() - began[1]

    found: dict[str, list[tuple[float, ...]]] = {"rounds": [], "scales": []}
    sides = {"rounds": plain, "scales": scaled}
    for ddp in sides.values():
        for _ in range(WARMUP):
            seconds(ddp)
    for block in range(blocks):
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for step in range(steps):
            for name in sorted(sides, reverse=(block + step) % 2 == 1):
                taken[name].append(seconds(sides[name]))
        for name, times in taken.items():
            found[name].append(tuple(median(of_kind) for of_kind in zip(*times, strict=True)))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # not through the destructors: a reducer and gloo's threads may wait for each other there


def main() -> None:
    """Measure both sides, print them and write the figures."""
    parser = options(__doc__)
    parser.add_argument("--blocks", type=int, default=30, help="of each side (30)")
    parser.add_argument("--steps", type=int, default=9, help="backward passes in a block (9)")
    args = parser.parse_args()
    if args.quick:
        args.blocks, args.steps = 3, 3
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it; gloo's threads, on which buckets arrive, go by it alone
    multiprocessing.set_forkserver_preload(["torch.distributed"])
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        arguments = args.blocks, args.steps, folder
        mp.start_processes(_rank, arguments, RANKS, start_method="forkserver")  # type: ignore[attr-defined,no-untyped-call]
        found: dict[str, list[tuple[float, float]]] = torch.load(Path(folder, "0.pt"))
    rows = []
    for place, what in enumerate(("a backward pass", "processor time of a rank")):
        rounds, scales = ([pair[place] for pair in found[name]] for name in ("rounds", "scales"))
        slower = gain(scales, rounds)
        share = f"{slower.ratio - 1:+.1%} ({slower.low - 1:+.1%} to {slower.high - 1:+.1%})"
        rows.append((what, f"{median(rounds) * 1e3:.1f} → {median(scales) * 1e3:.1f} ms", share))
    table(("rounds only → with scaling", "median", "slower by (99 %)"), rows)
    write_json(args.json, {"seconds": found})


if __name__ == "__main__":
    main()
