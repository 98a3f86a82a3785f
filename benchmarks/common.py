"""Functions that the benchmarks share: start jobs on one host or several, get step times, print tables, write JSON.

    words = [*torchrun("--nproc-per-node", "2"), MLP, "--steps", "50"]
    seconds = Local(folder).step_seconds(words, warmup=5)

Both sides of a comparison are started by the same code, so both pay the same for starting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from lab import Lab  # noqa: E402

from autoddp.timing import Speedup, median, speedup  # noqa: E402

JOBS = ROOT / "benchmarks" / "jobs"
MLP, NOOP = str(JOBS / "mlp.py"), str(JOBS / "noop.py")
TIMEOUT = 300.0  # seconds after which a job is called hung
_ports = itertools.count(29400)


def torchrun(*options: str) -> list[str]:
    """The command line of torchrun up to the script."""
    return [sys.executable, "-m", "torch.distributed.run", *options]


def autoddp(*options: str) -> list[str]:
    """The command line of autoddp up to the script."""
    return [sys.executable, "-m", "autoddp", *options]


def environment(threads: str | None = "1") -> dict[str, str]:
    """The environment of both sides, with OMP_NUM_THREADS=`threads`; None leaves the variable unset.

    One thread per rank is the default, because hosts share cores here, and torchrun does not set the variable for one
    rank per host. Bytecode is cached as for an installed package; otherwise each process would compile autoddp, but not
    torch.
    """
    dropped = {"PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONPATH": str(ROOT), **({"OMP_NUM_THREADS": threads} if threads else {})}


class Local:
    """Runs jobs on this machine, in `folder`, with a subfolder for each host."""

    threads: str | None = "1"
    """OMP_NUM_THREADS of every side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        self.home(0)

    def home(self, host: int) -> Path:
        """The folder in which a host's program runs, and in which autoddp's recipe and .autoddp/ appear."""
        place = self.folder / f"host{host}"
        place.mkdir(parents=True, exist_ok=True)
        return place

    def start(self, words: Sequence[str], log: Any, printed: Any = None) -> list[subprocess.Popen[Any]]:
        """Start the command on every host. What the first host prints goes to the file `printed`, if there is one."""
        own = environment(self.threads)
        return [subprocess.Popen(words, cwd=self.home(0), env=own, stdout=printed or log, stderr=log)]

    def printed(self, words: Sequence[str], timeout: float = TIMEOUT) -> str:
        """What the command prints on the first host; RuntimeError as in `run`."""
        with (self.folder / "printed").open("w+") as file:
            self.run(words, timeout, file)
            file.seek(0)
            return file.read()

    def run(self, words: Sequence[str], timeout: float = TIMEOUT, printed: Any = None) -> float:
        """Wall seconds of the command; RuntimeError with the end of its output if it fails."""
        path = self.folder / f"run{next(self._numbers)}.log"
        with path.open("w") as log:
            began = time.perf_counter()
            processes = self.start(words, log, printed)
            try:
                codes = _wait(processes, timeout)
                seconds = time.perf_counter() - began
            finally:
                _end(processes)
        if codes != [0] * len(codes):
            # None: it did not end. A torchrun whose peer has failed would wait for minutes.
            raise RuntimeError(f"{' '.join(words)} ended with {codes}:\n{path.read_text()[-3000:]}")
        return seconds

    def step_seconds(self, words: Sequence[str], warmup: int, at_once: int = 1, timeout: float = TIMEOUT) -> float:
        """Median seconds per step, after `warmup` steps, of a job that has the option --times; the mean over ranks.

        If `at_once` steps become one, it is the median of the mean of each such group.
        """
        ranks = self.ranks_seconds(words, timeout)
        groups = [range(at, at + at_once) for at in range(warmup, len(ranks[0]) - at_once + 1, at_once)]
        return sum(median([sum(rank[i] for i in group) / at_once for group in groups]) for rank in ranks) / len(ranks)

    def ranks_seconds(self, words: Sequence[str], timeout: float = TIMEOUT) -> list[list[float]]:
        """Seconds of each step on each rank, of a job that has the option --times."""
        path = self.folder / f"times{next(self._numbers)}.json"
        self.run([*words, "--times", str(path)], timeout)
        found: list[list[float]] = json.loads(path.read_text())
        return found

    def summary(self) -> dict[str, Any]:
        """The newest summary.json of a tuning run."""
        newest = max(self.home(0).glob(".autoddp/2*/summary.json"), key=lambda path: path.stat().st_mtime)
        found: dict[str, Any] = json.loads(newest.read_text())
        return found


class Hosts(Local):
    """Jobs on all hosts of a lab, one rank each; the rendezvous options are put in behind the launcher's name."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder)
        self.lab = lab

    def start(self, words: Sequence[str], log: Any, printed: Any = None) -> list[subprocess.Popen[Any]]:
        """See `Local.start`."""
        endpoint = f"{self.lab.address(0)}:{next(_ports)}"
        meet = ["--nnodes", str(len(self.lab)), "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        meet += ["--rdzv-endpoint", endpoint, "--rdzv-id", "benchmark"]
        processes = []
        for host in range(len(self.lab)):
            at = 4 if words[3] in ("bench", "diagnose") else 3  # a command stands before its options
            own = [*words[:at], *meet, "--local-addr", self.lab.address(host), *words[at:]]
            options = {"env": environment(self.threads), "cwd": self.home(host), "stderr": log}
            output = printed if printed and host == 0 else log
            processes.append(self.lab.popen(host, own, stdout=output, **options))
        return processes


def _wait(processes: Sequence[subprocess.Popen[Any]], timeout: float) -> list[int | None]:
    """Wait until all have ended, one has failed, or the seconds are over; the exit codes."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(codes):
            break
        time.sleep(0.005)
    return codes


def _end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """End those that still run, by a signal that lets a launcher end its workers too."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def paired(
    sides: dict[str, Callable[[], float]],
    rounds: int,
    known: Callable[[dict[str, list[float]]], bool] = lambda values: False,
) -> dict[str, list[float]]:
    """Run each side once a round, in alternating order; value i of every side belongs to round i.

    After a round, `known` may say that no further one is needed.
    """
    values: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            values[name].append(sides[name]())
        shown = "  ".join(f"{name} {found[-1] * 1e3:.1f} ms" for name, found in values.items())
        say(f"round {number + 1}/{rounds}: {shown}")
        if known(values):
            break
    return values


def gain(before: Sequence[float], after: Sequence[float]) -> Speedup:
    """The speed-up with its interval; a single round has none and shows as an interval from 0."""
    if len(before) < 2:
        ratio = before[0] / after[0]
        return Speedup(ratio, 0.0, float("inf"))
    return speedup(before, after)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print()
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(flush=True)


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def verdict(reached: bool) -> str:
    """The text of a verdict in a table."""
    return "yes" if reached else "NO"


def options(doc: str | None) -> argparse.ArgumentParser:
    """A parser with --json and --quick, to which the caller adds its own options."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean nothing")
    return parser


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures, and the machine and versions on which they were measured."""
    if path is None:
        return
    import torch

    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "load": os.getloadavg()}
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    path.write_text(json.dumps({"date": date, "machine": machine, **figures}, indent=1), encoding="utf-8")
