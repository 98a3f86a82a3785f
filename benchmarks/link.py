"""Claim: `autoddp bench` measures a link's rate and latency correctly, and its model is right at every size.

    python benchmarks/link.py --json link.json                        # as root, on a quiet machine: about six minutes

Two hosts (network namespaces on a shaped link) with one gloo rank each, at each rate:

rate     busbw of the largest message measured against the link's rate. For two ranks busbw is algbw, and gloo's ring
         moves the message's size each way, so the two can be compared. Target: within 10 %. Of that, 4.4 % are the
         headers of TCP, IP and Ethernet (1448 of 1514 bytes are payload).
latency  the round trip of 256 bytes over plain TCP that `bench` reports, against another program's ping-pong between
         the same hosts, before and after. Target: within 20 %. The smallest all-reduce, 1 KiB, is shown beside it.
         gloo's ring of two ranks exchanges twice (reduce-scatter, all-gather). Each exchange is two trips: the
         receiver's notice that its buffer is ready, and then the data. At each trip threads have to wake each other,
         which takes most of the time on two cores that both hosts share.
model    relative error of the fitted model at every size measured. Target: 10 % at most.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import JOBS, Hosts, Lab, autoddp, environment, median, options, say, table, verdict, write_json

from autoddp.bench import BenchResult, Sweep, busbw

RATES = {"100mbit": 0.0125, "1gbit": 0.125, "4gbit": 0.5}  # GB/s each way
OFF_RATE, OFF_LATENCY, OFF_MODEL = 0.10, 0.20, 0.10
PING_PONG = [sys.executable, str(JOBS / "ping_pong.py")]
PORT = "5000"  # each host of a lab has all ports to itself


def round_trips(hosts: Hosts, count: int) -> list[float]:
    """Seconds of plain TCP round trips from host 1 to host 0."""
    shared = {"env": environment(), "cwd": hosts.folder}
    server = hosts.lab.popen(0, [*PING_PONG, "--serve", PORT], **shared)
    try:
        words = [*PING_PONG, "--to", hosts.lab.address(0), PORT, "--count", str(count)]
        client = hosts.lab.popen(1, words, stdout=subprocess.PIPE, text=True, **shared)
        printed, _ = client.communicate(timeout=120)
        server.wait(10)
    finally:
        server.kill()
    found: list[float] = json.loads(printed)
    return found


def bench(hosts: Hosts, args: Namespace) -> BenchResult:
    """One run of the command on both hosts; host 0's result."""
    words = ["--max-size", args.max_size, "--budget", args.budget, "--backend", "gloo"]
    hosts.run([*autoddp("bench"), *words])
    (kept,) = hosts.home(0).glob(".autoddp/bench/*.json")
    return BenchResult.from_plain(json.loads(kept.read_text(encoding="utf-8")))


def at_rate(rate: str, folder: Path, args: Namespace) -> dict[str, Any]:
    """Ping-pong, bench, ping-pong on one lab."""
    say(f"{rate}: two hosts")
    with Lab(2, rate) as lab:
        hosts = Hosts(folder / rate, lab)
        trips = round_trips(hosts, args.count)
        result = bench(hosts, args)
        trips += round_trips(hosts, args.count)
    return {"round_trip": median(trips), "result": result.plain()}


def rows(rate: str, found: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for each of the three claims."""
    (sweep,) = BenchResult.from_plain(found["result"]).sweeps
    first, last = sweep.points[0], sweep.points[-1]
    bandwidth = busbw(last.bytes, last.seconds, sweep.ranks)
    seen, there = f"{bandwidth:.4g} GB/s", f"{RATES[rate]:g} GB/s"
    trip, ours = found["round_trip"], found["result"]["round_trip"]
    smallest = f"{first.seconds * 1e6:.0f} µs, of them {2 * trip * 1e6:.0f} µs in four trips"
    return [
        (rate, f"rate, {last.bytes / 2**20:g} MiB", seen, there, *_off(bandwidth / RATES[rate], OFF_RATE)),
        (rate, "round trip", f"{ours * 1e6:.1f} µs", f"{trip * 1e6:.1f} µs", *_off(ours / trip, OFF_LATENCY)),
        (rate, "all-reduce, 1 KiB", smallest, "", "", "", ""),
        (rate, f"model, {len(sweep.points)} sizes", *_model(sweep)),
    ]


def _off(ratio: float, limit: float) -> tuple[str, str, str]:
    return f"{ratio - 1:+.1%}", f"±{limit:.0%}", verdict(abs(ratio - 1) <= limit)


def _model(sweep: Sweep) -> tuple[str, ...]:
    assert sweep.model is not None, "a single size was measured"
    lines = f"{len(sweep.model.segments)} lines"
    worst = sweep.model.worst
    return lines, "measured", f"{worst:.1%} at most", f"≤ {OFF_MODEL:.0%}", verdict(worst <= OFF_MODEL)


def main() -> None:
    """Measure all rates and print one table."""
    parser = options(__doc__)
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--budget", default="90s", help="of each measurement (90s)")
    parser.add_argument("--max-size", default="64M", help="largest message (64M)")
    parser.add_argument("--count", type=int, default=3000, help="round trips of each ping-pong (3000)")
    args = parser.parse_args()
    if args.quick:
        args.budget, args.max_size, args.count = "4s", "1M", 300
    with tempfile.TemporaryDirectory(prefix="link-") as folder:
        results = {rate: at_rate(rate, Path(folder), args) for rate in args.rates}
    found = [row for rate, result in results.items() for row in rows(rate, result)]
    table(("link", "what", "bench", "against", "off by", "target", "reached"), found)
    write_json(args.json, {"results": results})


if __name__ == "__main__":
    main()
