"""The training script: a tiny DDP model on gloo, and between its steps the traces' acts.

    torchrun job.py --tree work --out out --traces save_over,json_counter [--act]

While it is tuned (AUTODDP_TUNING=1) it trains until tuning ends it, and acts. As the real job it only looks whether
each trace finds what is the user's, and says so in `out/real-rank0.json`: nothing that the real job writes can then be
taken for a trace of tuning. `--act` makes the real job act instead: without autoddp every trace changes its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

# `trace` in this folder would hide the standard library's module of that name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

gc.disable()  # see tests/scripts/common.py
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

gc.enable()
from traces.trace import EVERY, ROUNDS, Trace, load  # noqa: E402

SPREAD = 24  # steps over which all acts are spread, so that tuning is in several of its stages when they come
FIRST_STEP = 2


def main() -> None:
    args = _arguments()
    tuned = os.environ.get("AUTODDP_TUNING") == "1"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    everything = load()
    chosen = [everything[name] for name in args.traces.split(",") if name]
    acts = tuned or args.act
    if not acts:
        _look(chosen, Path(args.tree), Path(args.out) / f"real-rank{rank}.json")
    queue = [(trace, number) for number in range(ROUNDS) for trace in chosen] if acts else []
    per_step = max(1, math.ceil(len(queue) / SPREAD))
    ends = 10**7 if tuned else FIRST_STEP + math.ceil(len(queue) / per_step) + 3
    _train(queue, per_step, ends, Path(args.tree), rank)
    print(f"rank {rank} trained", flush=True)
    time.sleep(0.1)  # gloo's threads need the GIL once more, see tests/scripts/common.py
    dist.barrier()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tree", required=True, help="the folder in which each trace has its own")
    parser.add_argument("--out", required=True, help="the real job's report goes there")
    parser.add_argument("--traces", required=True, help="names with commas between")
    parser.add_argument("--act", action="store_true", help="act in the real job, too")
    return parser.parse_args()


def _train(queue: list[tuple[Trace, int]], per_step: int, ends: int, tree: Path, rank: int) -> None:
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    source = torch.Generator().manual_seed(rank)
    for step in range(ends):
        inputs = torch.randn(8, 16, generator=source)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(dim=1)).backward()
        optimizer.step()
        if step >= FIRST_STEP:
            now, queue = queue[:per_step], queue[per_step:]
            for trace, number in now:
                _act(trace, number, tree, rank)


def _act(trace: Trace, number: int, tree: Path, rank: int) -> None:
    """One act. The lines it prints are the evidence that it took place: its effects must not be seen."""
    if rank != 0 and trace.ranks != EVERY:
        return
    print(f"trace begins: {trace.name} {number}", flush=True)
    with _folder(trace, tree) as folder:
        trace.act(folder, rank, number)
    print(f"trace ends: {trace.name} {number}", flush=True)


@contextlib.contextmanager
def _folder(trace: Trace, tree: Path) -> Iterator[Path]:
    """The trace's folder, told in the way it asks for."""
    folder = tree.absolute() / trace.name
    if trace.where == "relative":
        yield Path(os.path.relpath(folder))
    elif trace.where == "inside":
        home = os.getcwd()
        os.chdir(folder)
        try:
            yield Path(".")
        finally:
            os.chdir(home)
    else:
        yield folder


def _look(chosen: list[Trace], tree: Path, report: Path) -> None:
    """What the real job finds: for each trace nothing, or what is wrong."""
    found = {}
    for trace in chosen:
        if trace.after is not None:
            try:
                trace.after(tree.absolute() / trace.name)
                found[trace.name] = ""
            except Exception:  # an AssertionError, or the file cannot be read
                found[trace.name] = traceback.format_exc(limit=1).strip().splitlines()[-1]
    report.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
