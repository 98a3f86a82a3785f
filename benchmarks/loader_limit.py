"""Claim: where data loaders are the limit, the speed-up that is told is that of the launched job.

    python benchmarks/loader_limit.py --json loader_limit.json     # as root: about ten minutes

Whole jobs, `autoddp jobs/mlp.py --workers 4 --batch-ms N`, tuned and then launched on two hosts joined by 200 Mbit/s,
against torchrun. Gradients that travel in 16 bits would make a step twice as fast, and the loaders give batches only so
fast. While settings take turns, the loaders' queues fill again, so a few fast steps find their batches ready. Of the
launched job the mean of the steps counts, after those that empty the queues.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import MLP, Hosts, Lab, Local, autoddp, options, say, table, torchrun, verdict, write_json

WIDTH, WORKERS = 512, 4  # 6.0 MiB of gradients; two batches for each worker may wait in its queue
BATCH_MS = [0.0, 720.0]  # of a worker: a batch every 180 ms, where a step takes about 270 as written and 140 in 16 bits
STEPS, LAUNCHED, EMPTIES = 2000, 120, 60  # of the script; that are made once it is launched; that may find a queue
WITHIN = 0.15  # of the speed-up of the launched job


def mean_step(jobs: Local, words: list[str]) -> float:
    """Seconds of a step of the whole job in the long run; the mean over ranks."""
    return statistics.fmean(statistics.fmean(of_rank[EMPTIES:]) for of_rank in jobs.ranks_seconds(words, 900.0))


def one_job(jobs: Local, batch_ms: float) -> dict[str, Any]:
    """Tune and launch the script, and run it as written."""
    loader = ["--workers", str(WORKERS), "--batch-ms", str(batch_ms)] if batch_ms else []
    script = [MLP, "--width", str(WIDTH), *loader, "--launched", str(LAUNCHED), "--steps"]
    base = mean_step(jobs, [*torchrun(), *script, str(LAUNCHED)])
    launched = mean_step(jobs, [*autoddp("--trials", "20"), *script, str(STEPS)])
    decision = jobs.summary()["decision"]
    of_it = [one for one in jobs.summary()["ladder"] if one["configuration"] == decision["configuration"]]
    told = of_it[0]["speedup"]["ratio"] if of_it else 1.0
    return {"batch_ms": batch_ms, "base": base, "launched": launched, "told": told, "why": decision["why"]}


def main() -> None:
    """Run both jobs, print the table and write the figures."""
    args = options(__doc__).parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="loaders-") as name:
        for batch_ms in BATCH_MS:
            with Lab(2, "200mbit") as lab:
                results.append(one_job(Hosts(Path(name) / str(batch_ms), lab), batch_ms))
            say(f"a batch of {batch_ms:.0f} ms: {results[-1]['why']}")
    rows = []
    for one in results:
        real = one["base"] / one["launched"]
        every = f"{one['batch_ms'] / WORKERS:.0f}" if one["batch_ms"] else "none"
        moved = f"{one['base'] * 1e3:.0f} → {one['launched'] * 1e3:.0f}"
        as_claimed = verdict(abs(one["told"] / real - 1) <= WITHIN)
        rows.append((every, moved, f"×{real:.2f}", f"×{one['told']:.2f}", as_claimed))
    table(("a batch every ms", "ms per step", "against torchrun", "told", f"within {WITHIN:.0%}"), rows)
    write_json(args.json, {"rows": results})


if __name__ == "__main__":
    main()
