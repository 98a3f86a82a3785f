"""Claim: an isolated attempt starts at most 0.3 s later than one that is not isolated, and its steps are as fast.

    python benchmarks/isolation.py --json isolation.json                      # about 5 minutes
    git worktree add /tmp/before REV && python benchmarks/isolation.py --against /tmp/before

Two local ranks. Each round tunes once on every side, with one trial: under the overlay, under guard, without isolation,
and, with `--against`, by another checkout of autoddp that has no isolation. Start-up is the time from the start of the
command until the ranks have made their first steps ("2 ranks on 1 node"); steps are those of the study's baseline.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from common import MLP, ROOT, autoddp, environment, options, say, table, verdict, write_json

from autoddp.timing import median, speedup

READY = "ranks on 1 node"
LATER = 0.3  # seconds


def measured(folder: Path, checkout: Path, own: list[str]) -> tuple[float, float]:
    """Seconds of the start-up, and of a step of the baseline."""
    folder.mkdir(parents=True, exist_ok=True)
    words = autoddp("--nproc-per-node", "2", "--trials", "1", "--tune-only", "--allow", "exact", *own)
    env = {**environment(), "PYTHONPATH": str(checkout)}
    log = folder / "log"
    with log.open("w") as file:
        began = time.perf_counter()
        process = subprocess.Popen(
            [*words, MLP, "--width", "256", "--depth", "4", "--steps", "1000000"],
            cwd=folder,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        while READY not in log.read_text() and process.poll() is None:
            time.sleep(0.005)
        started = time.perf_counter() - began
        if process.wait(300) != 0:
            raise RuntimeError(log.read_text()[-3000:])
    newest = max(folder.glob(".autoddp/2*/summary.json"), key=lambda path: path.stat().st_mtime)
    return started, json.loads(newest.read_text())["baseline"]["seconds"]


def main() -> None:
    """Run all sides, print the table and write the figures."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, without isolation")
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    sides: dict[str, tuple[Path, list[str]]] = {
        "off": (ROOT, ["--isolation", "off"]),
        "overlay": (ROOT, ["--isolation", "overlay"]),
        "guard": (ROOT, ["--isolation", "guard"]),
    }
    if args.against:
        sides["before"] = (args.against.absolute(), [])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="isolation-") as folder:
        for number in range(rounds):
            for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
                checkout, own = sides[name]
                found[name].append(measured(Path(folder) / name, checkout, own))
            shown = "  ".join(f"{name} {values[-1][0]:.2f} s" for name, values in found.items())
            say(f"round {number + 1}/{rounds}, load {os.getloadavg()[0]:.1f}: {shown}")
    plain = "before" if args.against else "off"
    rows = []
    for name, values in found.items():
        later = median([one[0] - other[0] for one, other in zip(values, found[plain], strict=True)])
        steps = speedup([step for _, step in found[plain]], [step for _, step in values])
        reached = "" if name == plain else verdict(later <= LATER)
        started = median([start for start, _ in values])
        rows.append((name, f"{started:.2f} s", f"{later:+.2f} s", reached, str(steps)))
    table(("isolation", "start-up", f"after {plain} (paired)", f"at most {LATER} s", f"steps against {plain}"), rows)
    write_json(args.json, {"rounds": found})


if __name__ == "__main__":
    main()
