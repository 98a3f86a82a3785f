"""Runs the checks of this folder and ends with a table: check, outcome, figure.

    run_checks.py [WORD ...]        those whose names contain one of the words; all without words
    run_checks.py --part 2/3        the second of three parts that take about as long as each other
    run_checks.py --jobs 4          four at a time, but one at a time where a check measures the device, or fills it
    run_checks.py --limit 500       no check runs on after so many seconds; the table says which did not end

The checks of a file share a process, so that torch is started once, unless they have a time limit of their own. After
a check that failed, a new process goes on with the next one: a failed capture may spoil the device for its process.
Each outcome is a line of $OUT/gpu_checks.jsonl as soon as it is there, so a run that is killed leaves what it found.
The exit code is 1 if a check did not pass and did not say what it needs that is not here, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"))
SECONDS = 90
"""For a check without a limit of its own: the mark `timeout` gives one."""
FINE = ("passed", "skipped")


@dataclass(frozen=True)
class Check:
    """What `conftest.py` tells of a check: its name, its own limit (0: none), and whether it needs the device alone."""

    name: str
    limit: int
    alone: bool

    @property
    def seconds(self) -> int:
        return self.limit or SECONDS

    @property
    def unit(self) -> str:
        """Checks with the same one share a process."""
        return self.name if self.limit else self.name.partition("::")[0]


def collected(words: list[str], results: Path, folder: Path = HERE) -> list[Check]:
    """The checks whose names contain one of the words. A file that cannot be imported is a failed row of `results`."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "checks.json"
        # Bodies that also run on a CPU do so in `make test`.
        words_for_pytest = ["--collect-only", "--continue-on-collection-errors", "-m", "gpu", str(folder)]
        done = subprocess.run(
            [*PYTEST, *words_for_pytest], cwd=ROOT,
            env={**os.environ, "GPU_CHECKS": str(place), "GPU_RESULTS": str(results)}, capture_output=True, text=True,
        )  # fmt: skip
        if not place.exists():
            raise SystemExit(f"the checks cannot be collected:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        found = [Check(**one) for one in json.loads(place.read_text())]
    return [check for check in found if not words or any(word in check.name for word in words)]


def units_of(checks: list[Check]) -> list[list[Check]]:
    """The checks by process, those that may take longest first."""
    by_unit: dict[str, list[Check]] = {}
    for check in checks:
        by_unit.setdefault(check.unit, []).append(check)
    return sorted(by_unit.values(), key=lambda unit: -sum(check.seconds for check in unit))


def part_of(units: list[list[Check]], part: str) -> list[list[Check]]:
    """The K-th of the N parts, for "K/N": each unit goes where least is to be done so far."""
    number, _, count = part.partition("/")
    loads: list[int] = [0] * int(count)
    parts: list[list[list[Check]]] = [[] for _ in loads]
    for unit in units:
        least = loads.index(min(loads))
        loads[least] += sum(check.seconds for check in unit)
        parts[least].append(unit)
    return parts[int(number) - 1]


class Runner:
    """Runs units in processes of their own, and ends all of them when it is told to stop."""

    def __init__(self, results: Path, folder: Path = HERE) -> None:
        self._results, self._folder = results, folder
        self._stopped = threading.Event()
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """End what runs; nothing more begins."""
        self._stopped.set()
        with self._lock:
            for process in self._running:
                _kill(process)

    def run(self, units: list[list[Check]], jobs: int) -> list[threading.Thread]:
        """Begin with the units, `jobs` at a time, and return the threads that see to it."""
        waiting: queue.SimpleQueue[list[Check]] = queue.SimpleQueue()
        for unit in units:
            waiting.put(unit)

        def work() -> None:
            while not self._stopped.is_set():
                try:
                    unit = waiting.get_nowait()
                except queue.Empty:
                    return
                while unit and not self._stopped.is_set():
                    self._process(unit)
                    over = outcomes(self._results)
                    unit = [check for check in unit if check.name not in over]

        threads = [threading.Thread(target=work) for _ in range(min(jobs, len(units)))]
        for thread in threads:
            thread.start()
        return threads

    def _process(self, unit: list[Check]) -> None:
        """Run the unit up to the first check that fails. At least one check has an outcome afterwards."""
        words = ["-x", "--timeout", str(SECONDS), "--timeout-method", "thread"]
        command = [*PYTEST, *words, *(str(self._folder / check.name) for check in unit)]
        # A launcher that is forked from this process could not use the device that its checks have used.
        environment = {**os.environ, "GPU_RESULTS": str(self._results), "TESTS_START_FROM_NOTHING": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        with self._lock:
            self._running.add(process)
        try:
            output, _ = process.communicate(timeout=sum(check.seconds for check in unit) + 60)
        except subprocess.TimeoutExpired:
            _kill(process)
            output, _ = process.communicate()
        finally:
            _kill(process)  # what it has left behind
            with self._lock:
                self._running.discard(process)
        if self._stopped.is_set():
            return
        over = outcomes(self._results)
        ran = [check for check in unit if check.name in over]
        if len(ran) < len(unit) and all(over[check.name]["outcome"] in FINE for check in ran):
            # Within the first check that has no outcome: pytest-timeout ends the process of a check that hangs.
            ended = next(check for check in unit if check.name not in over)
            why = f"the process ended with {process.returncode}, or was ended after {ended.seconds} s"
            record(self._results, check=ended.name, outcome="ended", figure=why)
            ran.append(ended)
        for check in ran:
            row = outcomes(self._results)[check.name]
            print(f"{row.get('seconds', 0):6.1f} s  {row['outcome']:7}  {check.name}", flush=True)
        if process.returncode:
            print(f"\n--- {ran[-1].name}\n{output[-6000:]}", flush=True)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def record(results: Path, **row: Any) -> None:
    """Append a row to the results."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def outcomes(results: Path) -> dict[str, dict[str, Any]]:
    """Check → its last row."""
    if not results.exists():
        return {}
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {row["check"]: row for row in rows if "check" in row}


def table(results: Path, checks: list[Check]) -> bool:
    """Print the outcome of every check, and return whether none of them failed or is missing."""
    found = outcomes(results)
    names = [*(check.name for check in checks), *(name for name in found if "::" not in name)]
    rows = [(name, found.get(name, {"outcome": "not run", "figure": "stopped, or out of time"})) for name in names]
    width = max((len(name.partition("gpu/")[2]) for name, _ in rows), default=0)
    print()
    for name, row in rows:
        print(f"{name:{width}}  {row['outcome']:7}  {row['figure']}", flush=True)
    return all(row["outcome"] in FINE for _, row in rows)


def parsed() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--part", default="1/1", metavar="K/N")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS")
    return parser.parse_args()


def main() -> None:
    """Run, print, write."""
    import torch

    asked, began = parsed(), time.monotonic()
    results = Path(os.environ.get("OUT") or tempfile.mkdtemp()) / "gpu_checks.jsonl"
    results.unlink(missing_ok=True)
    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else "none"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    about = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "nccl": nccl, "devices": device}
    print("  ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    record(results, **about)

    units = part_of(units_of(collected(asked.words, results)), asked.part)
    checks = [check for unit in units for check in unit]
    runner, terminated = Runner(results), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    alone = [unit for unit in units if any(check.alone for check in unit)]
    for together, jobs in (([unit for unit in units if unit not in alone], asked.jobs), (alone, 1)):
        for thread in runner.run(together, jobs):
            while thread.is_alive():
                thread.join(0.2)
                if terminated.is_set() or time.monotonic() - began > asked.limit:
                    runner.stop()
    if not table(results, checks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
