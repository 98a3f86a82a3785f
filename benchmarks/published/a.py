"""Experiment A: three hosts are only 40 % faster than one. Each question that was asked then, answered with a number.

    python benchmarks/published/a.py --json a.json       # as root: three network namespaces on 500 Mbit/s

The published job has a batch of 1024 on each of three T4, FashionMNIST in memory, and 431,080 parameters, or 29,330.
One node took 54 ms a step, three took 96 ms for three times the images, and half of that was the all-reduce.

    does it pay?              samples per second of three hosts against one, with the batch tripled and with it shared
    the all-reduce's share?   of a step, by leaving it out; of each rank's, and how much of that is waiting
    who waits for whom?       by `autoddp diagnose`: as it is, with rank 1 late, and with a test pass on rank 0
    the first copy?           the first step of an epoch against the others, and its batch and copy alone
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
LEAST = 0.03
"""Share of a step below which waiting is not worth a word."""
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


def first_steps(hosts: Hosts, args: Namespace) -> dict[str, tuple[float, float]]:
    """Seconds of the first step of an epoch, and of a usual one; the same of its batch, with the copy to the device."""
    found = {}
    for what in ("step", "batch"):
        seconds = times(hosts, "--compute", str(COMPUTE), "--of", what, steps=args.epochs * EPOCH - WARMUP)
        firsts = [seconds[epoch * EPOCH - WARMUP] for epoch in range(1, args.epochs)]
        found[what] = (median(firsts), median(seconds))
    return found


def diagnoses(hosts: Hosts) -> dict[str, Any]:
    """What `autoddp diagnose` says of the job as it is, with rank 1 late by 20 ms, and with a test pass on rank 0."""
    job = [JOB, "--compute", str(COMPUTE), *ENDLESS]
    sides = {
        "as published": job,
        "rank 1 is 20 ms late": [*job, "--late", "1", "20"],
        "rank 0 tests for 200 ms after each epoch": [*job, "--test", "200"],
    }
    return {name: json.loads(hosts.printed([*autoddp("diagnose"), "--json", *words])) for name, words in sides.items()}


def link(hosts: Hosts) -> dict[str, Any]:
    """What `autoddp bench` measures between the hosts."""
    found: dict[str, Any] = json.loads(hosts.printed([*autoddp("bench"), "--json"]))
    return found


def who_waits(diagnosis: dict[str, Any]) -> str:
    """Which rank waits for which, as a sentence. The rank that all others wait for is the one that waits least."""
    first, *others = sorted(diagnosis["ranks"], key=lambda rank: float(rank["waiting_ms"]))
    if others[-1]["waiting_ms"] < LEAST * diagnosis["step_ms"]:
        return f"in a usual step no rank waits for another: {others[-1]['waiting_ms']:.1f} ms at most"
    waits = " and ".join(f"rank {one['rank']} waits {one['waiting_ms']:.1f} ms" for one in others)
    return f"in a usual step {waits}, for rank {first['rank']}, which waits {first['waiting_ms']:.1f} ms"


def all_reduce(diagnosis: dict[str, Any]) -> str:
    """What part of a step each rank spends on the all-reduce after its backward pass, as a sentence."""
    parts = [f"{rank['exposed_ms'] / rank['step_ms']:.0%} on rank {rank['rank']}" for rank in diagnosis["ranks"]]
    transfer = min(rank["exposed_ms"] - rank["waiting_ms"] for rank in diagnosis["ranks"])
    return f"of a usual step, the all-reduce is {', '.join(parts)}: {transfer:.1f} ms of transfer, else waiting"


def show(rows: list[dict[str, Any]], firsts: dict[str, tuple[float, float]], told: dict[str, Any]) -> None:
    """The tables."""
    cells = []
    for row in rows:
        share = 1 - row["without"] / row["step"]
        steps = f"{row['one'] * 1e3:.1f} → {row['step'] * 1e3:.1f}"
        cells.append((row["network"], row["batch"], steps, f"{share:.0%}", f"×{row['times']:.2f}"))
    table(("network", "batch", "ms per step, one host → three", "of it all-reduce", "images per second"), cells)
    for what, name in (("step", "a step"), ("batch", "to get its batch and copy it to the device")):
        first, usual = firsts[what]
        print(f"{name}: {first * 1e3:.1f} ms at the start of an epoch, else {usual * 1e3:.1f} ms")
    for name, diagnosis in told.items():
        print(f"\n{name}:")
        if diagnosis["step_ms"] is None:
            print(f"    not measured: {'; '.join(diagnosis['not_measured'])}")
            continue
        for line in (*diagnosis["verdict"], all_reduce(diagnosis), who_waits(diagnosis)):
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
    parser.add_argument("--epochs", type=int, default=7, help="whose first steps are timed, but for the first (7)")
    parser.add_argument("--no-diagnose", action="store_true", help="only what torchrun shows")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.epochs = 8, 3
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
