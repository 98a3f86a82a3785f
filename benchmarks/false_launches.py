"""Claim: where nothing gains, at most 1.5 of 100 studies launch something else than the script as written.

    python benchmarks/false_launches.py --json false_launches.json        # resamples what was recorded: two minutes
    python benchmarks/false_launches.py --record                          # as root, 20 minutes: records anew

Steps of unchanged jobs were recorded here (tests/study/recorded_steps.json): three models, over loopback and between
two hosts at 1 Gbit/s and at 200 Mbit/s, on an idle machine, beside a busy process, beside one that works by turns, and
beside a second job. Final rounds are then made from them: each begins at a random place and takes the recorded steps
one after another, so that what neighbouring steps have in common is kept (a block bootstrap), and all configurations
are really the same. Everything else is the code that a study runs. So each launch is a false one.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import JOBS, Hosts, Lab, Local, options, say, table, torchrun, verdict, write_json
from replayed import RECORDED, Answer, answer_of, interval_of, recorded

MODELS = ("mlp", "conv", "transformer")
STEPS = {"loopback": 1200, "1gbit": 300, "200mbit": 120}
BESIDE = {
    "idle": "",
    "busy": "while True: pass",
    "by turns": (
        "import random, time\n"
        "while True:\n"
        "    until = time.monotonic() + random.expovariate(1.0)\n"
        "    while time.monotonic() < until: pass\n"
        "    time.sleep(random.expovariate(0.5))"
    ),
    "a second job": "",
}
MOST = 0.015


@contextlib.contextmanager
def beside(what: str, folder: Path) -> Iterator[None]:
    """Something else at work on this machine."""
    words = [sys.executable, "-c", BESIDE[what]] if BESIDE[what] else []
    if what == "a second job":
        words = [*torchrun("--nproc-per-node", "2", "--master-port", "29777"), str(JOBS / "shapes.py")]
        words += ["--model", "mlp", "--steps", "1000000"]
    process = (
        subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) if words else None
    )
    try:
        yield
    finally:
        if process:
            process.terminate()
            process.wait()


def record(folder: Path) -> dict[str, list[float]]:
    """Milliseconds of each step of rank 0, after the first ten, by link, model and what ran beside it."""
    found: dict[str, list[float]] = {}
    for link, steps in STEPS.items():
        with contextlib.ExitStack() as stack:
            hosts = Local(folder) if link == "loopback" else Hosts(folder, stack.enter_context(Lab(2, link)))
            own = ["--nproc-per-node", "2"] if link == "loopback" else []
            for model in MODELS:
                for what in BESIDE:
                    if what == "a second job" and link != "loopback":
                        continue
                    words = [*torchrun(*own), str(JOBS / "shapes.py"), "--model", model, "--steps", str(steps)]
                    with beside(what, folder):
                        seconds = hosts.ranks_seconds(words, 900)[0][10:]
                    found[f"{link}, {model}, {what}"] = [float(f"{1e3 * second:.4g}") for second in seconds]
                    middle = 1e3 * statistics.median(seconds)
                    say(f"{link}, {model}, {what}: {len(seconds)} steps, median {middle:.1f} ms")
    return found


def rows(found: dict[str, list[Answer]]) -> list[tuple[str, ...]]:
    """One for each kind of recording: false launches, rounds, and how the studies ended."""
    result = []
    for name, answers in found.items():
        wrong, low, high = interval_of(answers)
        rounds = sorted(answer.rounds for answer in answers)
        ends = [f"{sum(a.end == end for a in answers) / len(answers):.0%}" for end in ("no gain", "undecided")]
        result.append(
            (name, str(len(answers)), f"{wrong:.2%} ({low:.2%} to {high:.2%})", f"{statistics.median(rounds):g}", *ends)
        )
    return result


def main() -> None:
    """Record or resample, print the table and write the figures."""
    parser = options(__doc__)
    parser.add_argument("--record", action="store_true", help="record the steps first, and keep them")
    parser.add_argument("--resamples", type=int, default=10_000)
    args = parser.parse_args()
    if args.record:
        with tempfile.TemporaryDirectory(prefix="false-launches-") as folder:
            traces = record(Path(folder))
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(steps)}" for name, steps in traces.items())
        RECORDED.write_text(f"{{\n{lines}\n}}\n")
    traces, shuffle = recorded(), random.Random(0)
    count = args.resamples // (20 if args.quick else 1)
    each = {
        name: [answer_of(steps, shuffle) for _ in range(-(-count // len(traces)))] for name, steps in traces.items()
    }
    by_kind: dict[str, list[Answer]] = {"all": [answer for answers in each.values() for answer in answers]}
    for place in (0, 2):
        for name, answers in each.items():
            by_kind.setdefault(name.split(", ")[place], []).extend(answers)
    table(("recorded", "studies", "false launches (95 %)", "rounds", "no gain", "undecided"), rows(by_kind))
    wrong, _, high = interval_of(by_kind["all"])
    say(f"{len(traces)} recordings; at most {MOST:.1%}: {wrong:.2%}: {verdict(wrong <= MOST)}")
    plain = {name: [vars(answer) for answer in answers] for name, answers in each.items()}
    write_json(args.json, {"most": MOST, "share": wrong, "high": high, "answers": plain})


if __name__ == "__main__":
    main()
