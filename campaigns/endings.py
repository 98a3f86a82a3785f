"""Does a job that has trained end with exit code 0? Many real launches of each kind, and how many ended otherwise.

python campaigns/endings.py [--number 200] [--at-once 2] [--torchrun]

Each job has two ranks, 60 steps, and `destroy_process_group()` at its end. The kinds take turns: an exact recipe, a
bf16 hook, a hook that is watched, and no recipe, as after a tuning that has failed. In half of the jobs the script has
dropped its DDP object and its loss before. --torchrun adds plain torchrun, for comparison.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autoddp.codec import encode  # noqa: E402
from autoddp.knobs import Configuration, Rung  # noqa: E402
from autoddp.torchrun.surroundings import for_own_workers  # noqa: E402
from autoddp.wire import WatchPlan, WorkerConfig  # noqa: E402

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    ddp = DDP(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(60):
        loss = ddp(torch.randn(16, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kept = ddp, loss
    if sys.argv[1] == "dropped":
        kept = None
        del ddp, loss, optimizer
    dist.destroy_process_group()
    return kept


kept = main()
print("trained")
"""
BF16 = Configuration({"hook": "bf16"})
KINDS = {
    "exact recipe": WorkerConfig(configuration=Configuration({"gradient_as_bucket_view": True})),
    "bf16 hook": WorkerConfig(configuration=BF16),
    "watched hook": WorkerConfig(configuration=BF16, watch=WatchPlan(Rung.NEAR, 1.0, 5, 5, 1)),
    "as written": None,
    "torchrun": None,
}
LAUNCHER = """
import os
import sys

from autoddp.wire import WorkerConfig
from autoddp.wire.worker_config import naming_errors

order, more = sys.argv.pop(1), naming_errors(os.environ)
os.environ.update(more | (WorkerConfig.parse(order).environment(os.environ) if order else {}))
from torch.distributed.run import main

main()
"""
"""As autoddp starts its real job: torchrun's own code, with its variables for the ranks."""
PATIENCE = 300  # seconds


def run(folder: Path, kind: str, number: int) -> str:
    """Launch one job; "" if it has ended well, else how it ended."""
    config, environment = KINDS[kind], {**os.environ, **for_own_workers(os.environ)}
    words = ["-m", "torch.distributed.run"]
    if kind != "torchrun":
        words = ["-c", LAUNCHER, "" if config is None else encode(config)]
    how = ("kept", "dropped")[number % 2]
    words += ["--standalone", "--nproc-per-node", "2", str(folder / "job.py"), how]
    command = [sys.executable, *words]
    try:
        job = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return "it hung"
    if job.returncode == 0 and job.stdout.count("trained") == 2:
        return ""
    said = job.stderr.splitlines()
    last = [line for line in said if "terminate called" in line or "Signal" in line or "Error: " in line] or said[-1:]
    return f"exit code {job.returncode}: {' '.join(last[:2])[:160]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="jobs in all")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--torchrun", action="store_true")
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if kind != "torchrun" or arguments.torchrun]
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in kinds}
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
        folder = Path(name)
        (folder / "job.py").write_text(SCRIPT)
        jobs = [(kinds[n % len(kinds)], n // len(kinds)) for n in range(arguments.number)]
        for (kind, _), end in zip(jobs, pool.map(lambda job: run(folder, *job), jobs), strict=True):
            counts[kind][end] += 1
            print(f"{kind}: {end or 'ended well'}", flush=True)
    print(f"\ntorch {torch.__version__}, Python {sys.version.split()[0]}")
    for kind, ends in counts.items():
        wrong = {end: count for end, count in ends.items() if end}
        print(f"{kind:14} {ends['']:4} of {ends.total():4} ended well {wrong or ''}")
    sys.exit(any(end for kind, ends in counts.items() for end in ends if end and kind != "torchrun"))


if __name__ == "__main__":
    main()
