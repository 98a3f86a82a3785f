"""Measure the whole search space on one live job, then its best against studies' winners; a part of shaped_link.py.

    python -u benchmarks/grid.py --task task.json [torchrun's options] jobs/mlp.py --steps 100000

`Grid` replaces autoddp's `Study`: the same launcher, worker and `Measure` time the blocks, and on several hosts every
launcher follows the same measurements. grid.json is written to the current folder. For each rung:

1. screen: every distinct configuration is measured once, in random order (equal buckets count once, see layouts.py);
2. select: the best few and all winners are measured, interleaved, in some rounds; the best is the grid's best;
3. compare: the grid's best and the winners are measured, interleaved, in new rounds, so that the rounds that chose the
   best do not also judge it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import common
from layouts import bucket_part

import autoddp.attempts.tune
from autoddp.attempts.preparation import prepared
from autoddp.commandline.words import parse
from autoddp.hosts.agreement import agree
from autoddp.hosts.together import Hosts
from autoddp.knobs import AS_WRITTEN, GRADIENT_RUNGS, Configuration, Rung
from autoddp.network.own_network import Network
from autoddp.study import Measure, Observer, TrialFailed
from autoddp.study.budget import StepBudget
from autoddp.study.space import Space
from autoddp.timing import median
from autoddp.torchrun.options import node_range
from autoddp.torchrun.surroundings import environment_with
from autoddp.wire import JobFacts

TOP = 4  # of the screen, to be measured again
Key = tuple[str, str]


class Grid:
    """`task`: "rungs", "winners" (rung → configurations), "layouts" (bucket setting → buckets), "thin" (every n-th)."""

    def __init__(self, task: dict[str, Any], measure: Measure, facts: JobFacts) -> None:
        self._task = task
        self._measure = measure
        self._facts = facts
        self._random = random.Random(0)

    def run(self) -> dict[str, Any]:
        """Rung → what was found."""
        pilot = self._seconds(AS_WRITTEN, StepBudget(1.0))
        return {
            space.rung.value: self._rung(space, StepBudget(pilot))
            for space in map(self._space, GRADIENT_RUNGS)
            if space.rung.value in self._task["rungs"] and not space.empty
        }

    def _space(self, rung: Rung) -> Space:
        return Space(rung, self._facts)

    def _rung(self, space: Space, budget: StepBudget) -> dict[str, Any]:
        everything = [
            space.configuration(dict(zip(space.choices, values, strict=True)))
            for values in itertools.product(*space.choices.values())
        ]
        distinct = {self._key(configuration): configuration for configuration in reversed(everything)}
        asked = [Configuration(plain) for plain in self._task["winners"].get(space.rung.value, [])]
        winners = {self._key(configuration): configuration for configuration in asked}
        screened = self._screen(dict(list(distinct.items())[:: self._task["thin"]]), budget)
        ranked = sorted(screened, key=lambda key: screened[key])
        finalists = {**{key: distinct[key] for key in ranked[:TOP]}, **winners}
        selecting = self._rounds(finalists, 3 if budget.slow else 4, budget)
        best = min(selecting, key=lambda key: median(selecting[key]))
        comparing = self._rounds({best: finalists[best], **winners}, 6 if budget.slow else 8, budget)
        return {
            "configurations": len(everything),
            "distinct": len(distinct),
            "screened": [{**_shown(distinct[key]), "seconds": screened[key]} for key in ranked],
            "best": {**_shown(finalists[best]), "rounds": comparing[best]},
            "winners": [self._judged(configuration, best, comparing) for configuration in asked],
        }

    def _judged(self, winner: Configuration, best: Key, rounds: dict[Key, list[float]]) -> dict[str, Any]:
        key = self._key(winner)
        return {**_shown(winner), "same": key == best, "rounds": rounds[key]}

    def _key(self, configuration: Configuration) -> Key:
        buckets = bucket_part(configuration)
        rest = {n: v for n, v in configuration.plain().items() if not n.startswith("bucket_cap_mb")}
        return self._task["layouts"].get(buckets, buckets), json.dumps(rest, sort_keys=True)

    def _screen(self, configurations: dict[Key, Configuration], budget: StepBudget) -> dict[Key, float]:
        seconds = {}
        for key in self._random.sample(list(configurations), len(configurations)):
            try:
                seconds[key] = self._seconds(configurations[key], budget)
            except TrialFailed as failure:
                print(f"{configurations[key]} failed: {failure}", flush=True)
        return seconds

    def _rounds(
        self, configurations: dict[Key, Configuration], rounds: int, budget: StepBudget
    ) -> dict[Key, list[float]]:
        found: dict[Key, list[float]] = {key: [] for key in configurations}
        for _ in range(rounds):
            for key in self._random.sample(list(configurations), len(configurations)):
                found[key].append(self._seconds(configurations[key], budget))
        return found

    def _seconds(self, configuration: Configuration, budget: StepBudget) -> float:
        """Twice the steps of a trial where steps are fast enough for noise to matter."""
        lossy = configuration.rung is Rung.LOSSY
        steps = 12 if lossy else budget.block(budget.step) * (1 if budget.slow else 2)
        return median(self._measure(configuration, budget.warmup_of(configuration) + 2 * lossy, steps).seconds)


class Printed:
    """The `attempts.tune.Reporter` of the grid: what it finds is no recipe."""

    observer = Observer()

    def say(self, text: str) -> None:
        """Show a line."""
        print(text)

    warn = say

    def progress(self, cause: str, number: int, of: int) -> None:
        """An experiment begins."""

    def recipe(self, _outcome: object, _inputs: tuple[str, ...]) -> str:
        """Any text: without one, tuning has failed."""
        return "done"


def _shown(configuration: Configuration) -> dict[str, Any]:
    return {"configuration": configuration.plain(), "reads": str(configuration)}


def main() -> None:
    """Run one tuning job with the grid as its study."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--task", type=Path, required=True)
    args, words = parser.parse_known_args()
    task = json.loads(args.task.read_text())
    tune = autoddp.attempts.tune
    tune.Study = lambda measure, facts, *_: Grid(task, measure, facts)  # type: ignore[assignment, attr-defined]
    options = parse(words)
    with prepared(options) as made:
        agreement, network, hosts = None, Network(), Hosts()
        if node_range(options.torchrun)[1] > 1:
            agreement = agree(options.torchrun, "grid", "the grid")
            network, hosts = agreement.network, agreement.hosts
        with environment_with(network.variables):
            tuned = tune.Tuning(options, made, hosts, Printed(), network.together).run()
    if tuned.outcome is None:
        sys.exit(f"the grid was not measured: {tuned.why}")
    common.write_json(Path("grid.json"), {"rungs": tuned.outcome, "wall_seconds": tuned.wall_seconds})


if __name__ == "__main__":
    main()
