"""Final rounds made of recorded steps of unchanged jobs, in which no configuration differs from another."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.settings import StudySettings
from autoddp.study import Observer
from autoddp.study.budget import StepBudget
from autoddp.study.cost import Cost
from autoddp.study.decision import decide
from autoddp.study.finals import Finals, ladder_of
from autoddp.study.reserve import Reserve
from autoddp.timing import Headroom, median
from autoddp.wire import BlockDone

RECORDED = Path(__file__).parent / "study" / "recorded_steps.json"
OF_RUNG = {
    Rung.EXACT: Configuration({"gradient_as_bucket_view": True}),
    Rung.NEAR: Configuration({"hook": "bf16"}),
    Rung.LOSSY: Configuration({"hook": "powersgd", "powersgd_rank": 1}),
}


@dataclass(frozen=True)
class Answer:
    """Of one study."""

    launches: bool
    rounds: int
    end: str
    """"launch", "no gain" or "undecided"."""


def recorded() -> dict[str, list[float]]:
    """Name of a recording → seconds of its steps."""
    return {name: [one / 1e3 for one in steps] for name, steps in json.loads(RECORDED.read_text()).items()}


class Replay:
    """A `study.Measure` that gives recorded steps one after another, whatever is asked for."""

    def __init__(self, steps: Sequence[float], begin: int) -> None:
        self._steps, self._at = steps, begin

    def __call__(self, configuration: Configuration, warmup: int, steps: int, **_more: object) -> BlockDone:
        self._at += warmup
        found = tuple(self._steps[(self._at + number) % len(self._steps)] for number in range(steps))
        self._at += steps
        return BlockDone(0, found, 0.0, 0.0)


def answer_of(steps: Sequence[float], shuffle: random.Random, allow: Rung | None = None) -> Answer:
    """Final rounds from a random place of the recording on, and what they launch."""
    asked = StudySettings(allow=allow or shuffle.choice(list(OF_RUNG)))
    budget = StepBudget(median(steps))
    cost = Cost(Replay(steps, shuffle.randrange(len(steps))))
    finals = Finals(cost, budget, Reserve(cost, budget), asked, Observer(), shuffle, {})
    contenders = list(OF_RUNG.values())
    finals.run(contenders, dict.fromkeys((AS_WRITTEN, *contenders), budget.step))
    decision = decide(ladder_of(finals.paired.finalists), asked, Headroom(0.5, 0.4, 0.6))
    launches = decision.configuration != AS_WRITTEN
    end = "launch" if launches else "no gain" if finals.paired.is_settled else "undecided"
    return Answer(launches, len(finals.paired.rounds), end)


def interval_of(answers: Sequence[Answer]) -> tuple[float, float, float]:
    """The share of false launches, and its 95 % interval (Wilson, 1927)."""
    count, z = len(answers), 1.96
    share = sum(answer.launches for answer in answers) / count
    middle = (share + z * z / 2 / count) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / 4 / count**2)
    return share, max(0.0, middle - half), middle + half
