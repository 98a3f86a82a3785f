"""The same thing many times: nothing waits for ever, nothing is left behind, nothing grows.

    python campaigns/faults/endurance.py exceptions --number 200     # in a random rank, at a random early place
    python campaigns/faults/endurance.py kills --number 100          # SIGKILL of the launcher at random moments
    python campaigns/faults/endurance.py outputs --number 30         # into `head`, /dev/full and closed descriptors
    python campaigns/faults/endurance.py soak --number 50            # tunings in a row in one folder

`make endurance` runs all four with these numbers. What is random follows from the case's number.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("campaigns", "tests"))

from launchers import AUTODDP

from faults.cells import Result, add_options, commit, count, read, run_all
from faults.rooms import Room

HERE = Path(__file__).parent
TUNING = ["--nproc-per-node", "2", "--allow", "exact", "--trials", "2"]
LONGER = {"TUNED_TIMES_LONGER": "40"}
BOUND = 240.0  # seconds for one launch; alone on the machine it takes 10 to 20
LATEST_KILL = 14.0  # seconds after the command; about as long as tuning takes alone on the machine
CLEAN = 10.0  # seconds after which nothing may be left of a killed launcher
RUNS_KEPT = 5
COVERED = 0.95  # of the soak's intervals must hold the median speed-up
PLACES = ("import", "start", "model", *map(str, range(12)))


def exception(result: Result) -> None:
    """An exception somewhere early: in tuning alone, or in the real job too."""
    choice = random.Random(result.name)
    rank, place, where = choice.choice("01"), choice.choice(PLACES), choice.choice(("tuning", "both"))
    result.figures = {"rank": rank, "place": place, "in": where}
    with Room() as room:
        env = {**LONGER, "FAIL_RANK": rank, "FAIL_AT": place, "FAIL_IN": where}
        launch = room.launch([*TUNING, str(HERE / "early.py")], env)
        _to_the_end(result, room)
        code, expected = launch.process.poll(), 0 if where == "tuning" else 1
        if code != expected:
            result.problems.append(f"exit code {code}, not {expected}")
        if (where == "tuning") != _trained(room):
            result.problems.append("the job has trained" if _trained(room) else "the job has not trained")
        if f"planted: {place}" not in room.said:
            result.problems.append("nothing names the exception")
        result.problems += room.left()


def kill(result: Result) -> None:
    """SIGKILL of the launcher at a random moment of tuning; the seconds are those until nothing was left."""
    choice = random.Random(result.name)
    level = choice.choice(("overlay", "overlay", "guard"))
    latest = LATEST_KILL
    while not result.outcome:
        delay = choice.uniform(0.0, latest)
        result.figures = {"isolation": level, "after": round(delay, 2)}
        with Room() as room:
            words = [*TUNING, "--tune-only", "--isolation", level, str(HERE / "clinging.py")]
            launch = room.launch(words, LONGER)
            time.sleep(delay)
            if room.ended and launch.returncode == 0 and latest > 1:
                latest *= 0.7  # tuning was over before
                continue
            launch.process.kill()
            launch.process.wait()
            result.said = room.said[-1500:]
            killed = time.monotonic()
            result.problems += room.left(within=CLEAN)
            result.seconds = round(time.monotonic() - killed, 2)
            result.outcome = "clean" if not result.problems else "left"


OUTPUTS = {
    "into head": "{} 2>&1 | head -{}",
    "errors into head": "{{ {} 2>&1 >/dev/null | head -{} ; }} 2>&1",
    "full": "{} >/dev/full 2>/dev/full",
    "errors full": "{} 2>/dev/full",
    "closed": "{} <&- >&- 2>&-",
    "errors closed": "{} 2>&-",
    "output closed": "{} >&-",
    "a log's reader that dies": "{} 2> >(sleep {}) > >(sleep 1)",
    "a pipe without reader": "{} 2> >(exec 0<&-; sleep {})",
    "errors and output full, input closed": "{} <&- >/dev/full 2>&1",
}


def output(result: Result) -> None:
    """Nobody reads what is printed, or it cannot be written. A script that prints would fail under torchrun too."""
    kind = list(OUTPUTS)[int(result.name.split()[-1]) % len(OUTPUTS)]
    number = random.Random(result.name).randint(1, 12)
    result.figures = {"output": kind, "lines or seconds": number}
    with Room() as room:
        words = [*AUTODDP, *TUNING, str(HERE / "early.py")]
        line = OUTPUTS[kind].format(shlex.join(words), number)
        room.launch([], {**LONGER, "FAIL_RANK": ""}, command=("bash", "-c", line))
        _to_the_end(result, room)
        if not _trained(room):
            result.problems.append("the job has not trained")
        if not list(room.work(0).glob("*early.autoddp.toml")):
            result.problems.append("there is no recipe")
        result.problems += room.left(within=20.0)  # `sleep` of the line above may run on


class Soak:
    """Tunings in a row in one folder; each one is a case."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.sizes: list[int] = []

    def __call__(self, result: Result) -> None:
        room, output_ = self.room, self.room.work(0) / ".autoddp"
        before = set(output_.glob("*"))
        room.launches.clear()
        words = ["--nproc-per-node", "2", "--allow", "exact", "--trials", "3", "--tune-only", "--fresh"]
        room.launch([*words, "--keep-runs", str(RUNS_KEPT), str(HERE / "small_buckets.py")])
        _to_the_end(result, room)
        if room.codes != [0]:
            result.problems.append(f"exit code {room.codes[0]}")
        result.problems += room.left()
        runs = set(output_.glob("*"))
        if len(runs) > RUNS_KEPT or len(runs - before) != 1:
            result.problems.append(f"{len(runs)} run folders, {len(runs - before)} of them new")
        (new,) = runs - before
        result.figures = _speedup(json.loads((new / "summary.json").read_text()))
        result.figures["bytes"] = sum(path.lstat().st_size for path in output_.rglob("*"))


def _speedup(summary: Mapping[str, Any]) -> dict[str, Any]:
    exact = next((entry for entry in summary["ladder"] if entry["rung"] == "exact"), None)
    return {} if exact is None else {key: exact["speedup"][key] for key in ("ratio", "low", "high")}


def _to_the_end(result: Result, room: Room) -> None:
    began = time.monotonic()
    if not room.wait(result.bound):
        result.problems.append(f"not ended after {result.bound:.0f} s")
    result.seconds = round(time.monotonic() - began, 1)
    result.outcome = "ended" if room.ended else "waits"
    result.said = room.said[-3000:]


def _trained(room: Room) -> bool:
    return all((room.folder / f"rank{rank}.pt").exists() for rank in range(2))


@dataclass(frozen=True)
class Test:
    """`many` is the number that `make endurance` runs."""

    run: Callable[[Result], None]
    many: int
    bound: float
    says: str


TESTS = {
    "exceptions": Test(exception, 200, BOUND, "starts with an exception at a random early place end as they must"),
    "kills": Test(kill, 100, CLEAN, "SIGKILLs of the launcher leave nothing after 10 s"),
    "outputs": Test(output, 30, BOUND, "jobs whose output cannot be written end, trained and with a recipe"),
    "soak": Test(lambda result: None, 50, BOUND, "tunings in a row end with nothing left outside the run folders"),
}


def results_of(test: str, number: int) -> list[Result]:
    """The cases of a test, not yet run."""
    return [Result(f"{test} {n}", test, "", TESTS[test].bound) for n in range(number)]


def _verdict(test: str, results: Sequence[Result]) -> bool:
    good, tried = count(results)
    seconds = sorted(result.seconds for result in results)
    if not tried:
        return True
    spread = f"median {statistics.median(seconds):.1f} s, longest {seconds[-1]:.1f} s of {results[0].bound:.0f} s"
    print(f"{good} of {tried} {TESTS[test].says}; {spread}")
    return good == tried and (test != "soak" or _soak_verdict(results))


def _soak_verdict(results: Sequence[Result]) -> bool:
    found = [result.figures for result in results if "ratio" in result.figures]
    if not found:
        return False
    middle = statistics.median(figures["ratio"] for figures in found)
    inside = sum(figures["low"] <= middle <= figures["high"] for figures in found)
    sizes = [figures["bytes"] for figures in found]
    print(f"the median speed-up of all runs, ×{middle:.3f}, lies in the interval of {inside} of {len(found)} runs")
    if len(sizes) > RUNS_KEPT:
        print(f"run folders: {sizes[RUNS_KEPT - 1]} bytes after {RUNS_KEPT} runs, {sizes[-1]} after {len(sizes)}")
    return inside >= COVERED * len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=[], help=f"some of: {', '.join(TESTS)}")
    parser.add_argument("--number", type=int, metavar="N", help="cases of each test")
    add_options(parser)
    options = parser.parse_args()
    if unknown := set(options.tests) - set(TESTS):
        parser.error(f"no such test: {', '.join(sorted(unknown))}")
    if options.show:
        shown = read(options.show)
        print(f"commits: {', '.join(dict.fromkeys(result.commit for result in shown))}")
        tests = {test: [result for result in shown if result.row == test] for test in TESTS}
        verdicts = [_verdict(test, results) for test, results in tests.items()]
        sys.exit(not all(verdicts))
    print(f"commit {commit()}", flush=True)
    good = []
    for test in options.tests or list(TESTS):
        cases = results_of(test, options.number or TESTS[test].many)
        if test == "soak":
            with Room() as room:
                options.at_once = 1
                good.append(_verdict(test, run_all(cases, Soak(room), options)))
        else:
            good.append(_verdict(test, run_all(cases, TESTS[test].run, options)))
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
