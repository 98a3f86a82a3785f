"""Experiment A: three hosts are only 40 % faster than one. Each question that was asked then, answered with a number.

    python benchmarks/published/a.py --json a.json       # as root: three network namespaces on 500 Mbit/s

The published job has a batch of 1024 on each of three T4, FashionMNIST in memory, and 431,080 parameters, or 29,330.
One node took 54 ms a step, three took 96 ms for three times the images, and half of that was the all-reduce.

    does it pay?              samples per second of three hosts against one, with the batch tripled and with it shared
    who waits for whom?       waiting and transfer on each rank, by `autoddp diagnose`: as it is, and with rank 1 late
    the first copy?           the first step of an epoch against the others
    is the batch too small?   the same with a third of the batch and of the computing on each host
    what does the link do?    `autoddp bench` beside the step's own transfer
    bytes or latency?         the small network beside the large one

The hosts share this machine's cores, so a step computes by sleeping for as long as the published GPU computed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import ROOT, Hosts, Lab, Local, autoddp, median, options, say, table, torchrun, write_json

JOB = str(ROOT / "benchmarks" / "published" / "jobs" / "fashion.py")
ENDLESS = ["--steps", "1000000"]
BATCH, COMPUTE, HOSTS = 1024, 54.0, 3
BYTES = {"large": 4 * 431_080, "small": 4 * 29_330}
"""Of the networks' gradients."""
WARMUP = 5
EPOCH = 1024 * 30 // BATCH // HOSTS
"""Steps of an epoch on three hosts."""


def times(here: Local, *more: str, steps: int) -> list[float]:
    """Seconds of each step after the warm-up, on the slowest rank."""
    local = [] if isinstance(here, Hosts) else ["--nproc-per-node", "1"]
    words = [*torchrun(*local), JOB, *more, "--steps", str(WARMUP + steps)]
    return [max(step) for step in zip(*here.ranks_seconds(words), strict=True)][WARMUP:]


def scaling(folder: Path, hosts: Hosts, args: Namespace) -> list[dict[str, Any]]:
    """What three hosts give against one, for both networks, with the batch tripled and with it shared."""
    alone = Local(folder / "alone")
    found = []
    for network in ("large", "small"):
        whole = ["--network", network, "--compute", str(COMPUTE)]
        third = ["--network", network, "--batch", str(BATCH // HOSTS), "--compute", str(COMPUTE / HOSTS)]
        one = median(times(alone, *whole, "--alone", steps=args.steps))
        for name, own, images in (("tripled", whole, BATCH * HOSTS), ("shared", third, BATCH // HOSTS * HOSTS)):
            step = median(times(hosts, *own, steps=args.steps))
            without = median(times(hosts, *own, "--no-sync", steps=args.steps))
            speed = images / step / (BATCH / one)
            say(f"{network}, batch {name}: {one * 1e3:.1f} → {step * 1e3:.1f} ms, ×{speed:.2f}")
            row = {"network": network, "batch": name, "one": one, "step": step, "without": without, "times": speed}
            found.append(row)
    return found


def first_steps(hosts: Hosts, args: Namespace) -> tuple[float, float]:
    """Seconds of the first step of an epoch, and of a usual one."""
    steps = times(hosts, "--compute", str(COMPUTE), steps=3 * EPOCH - WARMUP)
    firsts = [steps[at - WARMUP] for at in (EPOCH, 2 * EPOCH)]
    return median(firsts), median(steps)


def diagnoses(hosts: Hosts) -> dict[str, Any]:
    """What `autoddp diagnose` says of the job as it is, and with rank 1 late by 20 ms."""
    job = [JOB, "--compute", str(COMPUTE), *ENDLESS]
    sides = {"as published": job, "rank 1 is 20 ms late": [*job, "--late", "1", "20"]}
    return {name: json.loads(hosts.printed([*autoddp("diagnose"), "--json", *words])) for name, words in sides.items()}


def link(hosts: Hosts) -> dict[str, Any]:
    """What `autoddp bench` measures between the hosts."""
    found: dict[str, Any] = json.loads(hosts.printed([*autoddp("bench"), "--json"]))
    return found


def show(rows: list[dict[str, Any]], firsts: tuple[float, float], told: dict[str, Any]) -> None:
    """The tables."""
    cells = []
    for row in rows:
        share = 1 - row["without"] / row["step"]
        steps = f"{row['one'] * 1e3:.1f} → {row['step'] * 1e3:.1f}"
        cells.append((row["network"], row["batch"], steps, f"{share:.0%}", f"×{row['times']:.2f}"))
    table(("network", "batch", "ms per step, one host → three", "of it reduction", "images per second"), cells)
    first, usual = firsts
    print(f"the first step of an epoch takes {first * 1e3:.1f} ms, the others {usual * 1e3:.1f} ms")
    for name, diagnosis in told.items():
        print(f"\n{name}:")
        for line in (*diagnosis["verdict"], diagnosis["scaling"]["text"]):
            print(f"    {line}")
        names = ("step_ms", "data_ms", "copy_ms", "forward_ms", "backward_ms", "exposed_ms", "waiting_ms")
        rows_of = [(rank["rank"], *(f"{rank[name]:.1f}" for name in names)) for rank in diagnosis["ranks"]]
        table(("rank", *(name.removesuffix("_ms") for name in names)), rows_of)
        for one in diagnosis["findings"]:
            print(f"    {one['cause']} on {one['ranks']}: {one['ms']:.1f} ms, {one['status']}. {one['fix']}")


def main() -> None:
    """Measure, print the answers."""
    parser = options(__doc__)
    parser.add_argument("--rate", default="500mbit", help="of each host's link (500mbit)")
    parser.add_argument("--steps", type=int, default=60, help="timed in each job (60)")
    parser.add_argument("--no-diagnose", action="store_true", help="only what torchrun shows")
    args = parser.parse_args()
    if args.quick:
        args.steps = 8
    with tempfile.TemporaryDirectory(prefix="published-a-") as name, Lab(HOSTS, args.rate) as lab:
        hosts = Hosts(Path(name, "hosts"), lab)
        rows = scaling(Path(name), hosts, args)
        firsts = first_steps(hosts, args)
        bench = link(hosts)
        told = {} if args.no_diagnose else diagnoses(hosts)
    show(rows, firsts, told)
    for network, size in BYTES.items():
        points = [point for sweep in bench["sweeps"] for point in sweep["points"]]
        near = min(points, key=lambda point: abs(point["bytes"] - size))
        took = f"{near['seconds'] * 1e3:.1f} ms ({near['low'] * 1e3:.1f} to {near['high'] * 1e3:.1f})"
        print(f"the link alone, by autoddp bench: {near['bytes']} bytes (the {network} network has {size}) take {took}")
    write_json(args.json, {"scaling": rows, "first": firsts, "diagnoses": told, "bench": bench})


if __name__ == "__main__":
    main()
