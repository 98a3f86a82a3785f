"""Claim: a script that reduces after each of eight backward passes per step runs three times as fast, exactly.

    python benchmarks/micro_batches.py --json micro_batches.json      # as root, on a quiet machine: about five minutes

Two hosts (network namespaces) on a link of 1 Gbit/s, jobs/mlp.py with eight micro-batches and no `no_sync`:
`autoddp --trials 20 --allow exact --tune-only`, then whole jobs in turn (AB BA …), its recipe against torchrun, and
against torchrun with `no_sync` written into the script. Afterwards the trained parameters must be those of `no_sync`.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path

import torch
from common import MLP, Hosts, Lab, autoddp, gain, median, options, paired, say, table, torchrun, verdict, write_json

from autoddp.recipe import load

TARGET = 3.0
JOB = [MLP, "--micro-batches", "8"]


def compared(hosts: Hosts, args: Namespace) -> dict[str, list[float]]:
    """Seconds per step of whole jobs."""
    count = ["--steps", str(args.steps + args.warmup)]
    recipe = autoddp("--recipe", "found.toml")
    sides = {
        "torchrun": lambda: hosts.step_seconds([*torchrun(), *JOB, *count], args.warmup),
        "by hand": lambda: hosts.step_seconds([*torchrun(), *JOB, "--no-sync", *count], args.warmup),
        "autoddp": lambda: hosts.step_seconds([*recipe, *JOB, *count], args.warmup),
    }
    return paired(sides, args.rounds)


def same_parameters(hosts: Hosts) -> bool:
    """Whether the launched job leaves, bit for bit, what no_sync by hand leaves."""
    count = ["--steps", "6"]
    hosts.run([*torchrun(), *JOB, *count, "--no-sync", "--save", str(hosts.folder / "hand.pt")])
    hosts.run([*autoddp("--recipe", "found.toml"), *JOB, *count, "--save", str(hosts.folder / "ours.pt")])
    hand, ours = (torch.load(hosts.folder / f"{name}.pt") for name in ("hand", "ours"))
    return all(torch.equal(hand[name], ours[name]) for name in hand)


def main() -> None:
    """Tune, compare, show."""
    parser = options(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4, help="of whole jobs, each side once (4)")
    parser.add_argument("--steps", type=int, default=12, help="timed in each job (12)")
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.trials, args.rounds, args.steps = 4, 1, 3
    with tempfile.TemporaryDirectory(prefix="micro-batches-") as folder, Lab(2, "1gbit") as lab:
        hosts = Hosts(Path(folder), lab)
        own = ["--trials", str(args.trials), "--allow", "exact", "--tune-only", "--recipe", "found.toml"]
        hosts.run([*autoddp(*own), *JOB, "--steps", "1000000"])
        chosen = load(hosts.home(0) / "found.toml").configuration
        say(f"launches {chosen}")
        seconds = compared(hosts, args)
        same = same_parameters(hosts)
    rows = []
    for side, target in (("autoddp", TARGET), ("by hand", None)):
        found = gain(seconds["torchrun"], seconds[side])
        times = f"{median(seconds['torchrun']) * 1e3:.0f} → {median(seconds[side]) * 1e3:.0f} ms"
        reached = verdict(found.ratio >= target) if target else ""
        rows.append((side, times, str(found), f"≥ {target:g}" if target else "", reached))
    table(("side", "ms per step, torchrun → side", "speed-up", "target", "reached"), rows)
    print(f"the same parameters as with no_sync by hand, bit for bit: {verdict(same)}")
    write_json(args.json, {"configuration": chosen.plain(), "seconds": seconds, "same_parameters": same})


if __name__ == "__main__":
    main()
