"""Experiment B: which of DDP's settings help ViT-L/32 on this machine, one after the other, against one GPU alone.

    python benchmarks/published/b.py --json b.json       # on all GPUs of this machine
    python benchmarks/published/b.py --small             # a small transformer, two ranks on the CPU: shows that it runs

The published setting puts the whole model in one bucket (`bucket_cap_mb=2000`), so nothing overlaps. Each row changes
what it names beside that, in whole jobs under torchrun; rounds alternate their order. Caps go up to the whole model,
each with full gradients, with bf16 and with PowerSGD. One row leaves the reduction out, which shows its share. With
--small, PowerSGD is measured in one bucket only: with several, torch's own hook ends the process on gloo.

The published figures, in steps per second on 8 L40S (PCIe) and 8 A100 (NVLink): one GPU without DDP 8.91 and 5.17, DDP
on one GPU 8.40 and 5.04; on eight, six times slower than one on L40S (84 % of a step is the all-reduce), 8 % slower on
A100. bf16 gave +65 % on L40S and a loss on A100; all together +86 % with bf16, five times with PowerSGD, and 4 % on
A100.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import ROOT, Local, gain, median, options, paired, table, torchrun, write_json

JOB = [str(ROOT / "benchmarks" / "published" / "jobs" / "vision.py")]
if not torch.cuda.is_available():
    JOB.insert(0, str(ROOT / "tests" / "run_with_torchvision.py"))
ONE_BUCKET = ["--bucket-cap-mb", "2000"]
WARMUP = 12  # PowerSGD begins with the 10th step

CAPS = {False: (25, 50, 100, 200, 400), True: (1, 2, 4, 8)}
"""MiB of a bucket, by --small: the models have 1,169 and 12 MiB of gradients."""
PUBLISHED, UNREDUCED = "one bucket, as published", "one bucket, without reduction"


def settings(small: bool) -> dict[str, list[str]]:
    """Row → the options of the job."""
    rows = {
        PUBLISHED: ONE_BUCKET,
        UNREDUCED: [*ONE_BUCKET, "--no-sync"],
        "DDP's own defaults": [],
        "one bucket, static_graph": [*ONE_BUCKET, "--static-graph"],
        "one bucket, gradient_as_bucket_view": [*ONE_BUCKET, "--bucket-view"],
        "one bucket, bf16": [*ONE_BUCKET, "--hook", "bf16"],
        "one bucket, PowerSGD of rank 1": [*ONE_BUCKET, "--hook", "powersgd"],
    }
    hooks = {"": [], ", bf16": ["--hook", "bf16"], ", PowerSGD of rank 1": ["--hook", "powersgd"]}
    if small:
        # torch's own hook sends a bucket's second factors from a callback, and the order of callbacks differs between
        # ranks. With several buckets gloo then mixes two reductions up, and ends the process.
        del hooks[", PowerSGD of rank 1"]
    for name, hook in hooks.items():
        rows |= {f"cap {cap}{name}": ["--bucket-cap-mb", str(cap), *hook] for cap in CAPS[small]}
    both = ["--static-graph", "--bucket-view"]
    for cap in CAPS[small]:
        rows[f"static_graph, view, bf16, cap {cap}"] = [*both, "--hook", "bf16", "--bucket-cap-mb", str(cap)]
    rows["static_graph, view, bf16, one bucket"] = [*both, "--hook", "bf16", *ONE_BUCKET]
    rows["static_graph, view, PowerSGD, one bucket"] = [*both, "--hook", "powersgd", *ONE_BUCKET]
    return rows


def wanted(args: Namespace) -> dict[str, list[str]]:
    """The rows to measure."""
    rows = settings(args.small)
    if not args.only:
        return rows
    always = (PUBLISHED, UNREDUCED)
    return {name: more for name, more in rows.items() if name in always or any(part in name for part in args.only)}


def measure(here: Local, args: Namespace) -> dict[str, list[float]]:
    """Seconds of a step in each row, for every round."""
    small = ["--model", "tiny", "--batch", "8", "--workers", "1"] if args.small else []
    steps = ["--steps", str(WARMUP + args.steps)]

    def seconds(ranks: int, *more: str) -> float:
        words = [*torchrun("--nproc-per-node", str(ranks)), *JOB, *small, *more, *steps]
        return here.step_seconds(words, WARMUP)

    sides = {"one, without DDP": lambda: seconds(1, "--alone"), "one, DDP": lambda: seconds(1, *ONE_BUCKET)}
    for name, more in wanted(args).items():
        sides[name] = lambda more=more: seconds(args.ranks, *more)  # type: ignore[misc]
    return paired(sides, args.rounds)


def show(found: dict[str, list[float]], ranks: int) -> None:
    """The table: each row against the published setting, and what all ranks give against one alone."""
    alone, written = found["one, without DDP"], found[PUBLISHED]
    rows = []
    for name, seconds in found.items():
        count = 1 if name.startswith("one, ") else ranks
        step = median(seconds)
        efficiency = median(alone) / step
        against = "" if count == 1 else str(gain(written, seconds)) if seconds is not written else "1"
        rows.append((name, count, f"{step * 1e3:.1f}", f"{1 / step:.2f}", f"{efficiency:.0%}", against))
    table(("setting", "ranks", "ms per step", "steps/s", "of one alone", "against as published"), rows)
    share = 1 - median(found[UNREDUCED]) / median(written)
    print(f"in one bucket, the all-reduce is {share:.0%} of a step")
    trained = [name for name in found if name != UNREDUCED and not name.startswith("one, ")]
    best = min(trained, key=lambda name: median(found[name]))
    times = ranks * median(alone) / median(found[best])
    print(f"best: {best}; {ranks} ranks then do the work of {times:.2f} that train alone")


def main() -> None:
    """Measure all rows, print the table."""
    parser = options(__doc__)
    parser.add_argument("--small", action="store_true", help="a small transformer on the CPU")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="rows whose name has one of these, beside the first")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2, help="(all GPUs, or 2)")
    parser.add_argument("--rounds", type=int, default=3, help="of whole jobs, each row once (3)")
    parser.add_argument("--steps", type=int, default=20, help="timed in each job (20)")
    args = parser.parse_args()
    if not args.small and not torch.cuda.is_available():
        parser.error("no GPU here: only --small runs")
    if args.quick:
        args.rounds, args.steps = 2, 4
    with tempfile.TemporaryDirectory(prefix="published-b-") as folder:
        found = measure(Local(Path(folder)), args)
    show(found, args.ranks)
    write_json(args.json, {"ranks": args.ranks, "small": args.small, "seconds": found})


if __name__ == "__main__":
    main()
