"""Does the job train what it says? Each training under each configuration, against the same as torchrun runs it.

    .venv/bin/python campaigns/equality/matrix.py [--json] [--only WORDS] [--short]

Parameters must be bit for bit equal between ranks. Against torchrun: bit for bit where the order of additions is the
same (two ranks: the sum of two numbers has one order, so buckets do not matter), at most 1e-5 relative where it is
another, at most the configuration's stated error where gradients are changed. Where several steps are one, the same
holds against the loop that a user writes for that (`by_hand.py`). A cell may also end in a reason: the knob is left
out, or the job stops with an error. Exit code 1 where any cell does neither.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import launched
import torch
from cells import BY_HAND, ENDS_TUNING, HEADROOM, OF_A_LOOP, RECIPE, TUNED, Cell, Matrix, Ran
from trainings import (
    DIFFER_ON_PURPOSE,
    HOLDS_LAST,
    NEVER_OFFERED,
    NO_LOOP_BY_HAND,
    SKIPS_ALONE,
    TRAININGS,
    shorten,
)

from autoddp.knobs import LIMITS, Configuration, GradientError, Rung, why_refused

ROUNDING = 1e-5
"""Relative, of all parameters, after 40 steps: additions in another order."""
STATED = {"bf16": 0.1, "fp16": 0.1, "powersgd": 1.0}
"""Relative change of the parameters that a hook may make in 40 steps (of the GAN; a fiftieth of it elsewhere)."""

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "cap": {"bucket_cap_mb": 0.5},
    "caps": {"bucket_cap_mb_list": [0.5, 0.5, 1.0]},
    "view": {"gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "static": {"static_graph": True},
    "defer 2": {"defer_reductions": 2},
    "defer 4": {"defer_reductions": 4},
    "threads": {"threads": 2},
    "cap view batched": {"bucket_cap_mb": 0.5, "gradient_as_bucket_view": True, "batched_grad_copy": True},
    "static view": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1.0},
    "defer 4 view": {"defer_reductions": 4, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.5},
    "static defer 4": {"static_graph": True, "defer_reductions": 4},
    "steps 2": {"accumulate_steps": 2},
    "steps 4 view": {"accumulate_steps": 4, "gradient_as_bucket_view": True},
    "steps 2 defer 4": {"accumulate_steps": 2, "defer_reductions": 4},
    "static steps 2": {"static_graph": True, "accumulate_steps": 2},
    "bf16": {"hook": "bf16"},
    "fp16 cap": {"hook": "fp16", "bucket_cap_mb": 0.5},
    "bf16 defer 4": {"hook": "bf16", "defer_reductions": 4},
    "powersgd": {"hook": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 5, "bucket_cap_mb": 0.5},
    "powersgd steps 2": {"hook": "powersgd", "powersgd_rank": 4, "powersgd_start_step": 1, "accumulate_steps": 2},
}
TURNED = ("cap view batched", "static view", "defer 4 view", "static steps 2", "fp16 cap", "bf16 defer 4", "powersgd")
"""Also turned to while the training runs; the others are parts of these."""
SHORT_TRAININGS = ("plain", "two DDP", "no_sync later", "micro short last", "micro unused")
SHORT_TUNED = ("plain", "no_sync later", "micro unused")
"""Of these, those that are tuned as well: a recipe and a trial share what changes DDP."""
SHORT_CONFIGURATIONS = ("caps", "defer 4 view", "steps 2", "powersgd")
SHORT_CELLS = (
    ("kept", TUNED, "cap view batched"),
    ("flat later", RECIPE, "view"),
    ("one flat gradient", RECIPE, "view"),
    ("other memory", RECIPE, "view"),
    ("kept by a graph later", RECIPE, "view"),
    ("noise scale", RECIPE, "steps 4 view"),
    ("new objects", RECIPE, "powersgd"),
    ("faint layer", RECIPE, "fp16 cap"),
)
"""Also in the short part: scripts that hold gradients or build new DDP objects, which few knobs concern; and a layer
that float16 cannot hold."""
FURTHER_CELLS = (
    ("kept by DLPack later", RECIPE, "view"),
    ("noise scale", RECIPE, "defer 2"),
    ("new objects micro", RECIPE, "defer 2"),
)
"""Of the same kinds: `make test-whole` runs them."""
LAUNCHED = "launched"
LAUNCHED_TRAININGS = ("plain", "no_sync 2", "no_sync later", "toggled", "micro short last", "GAN")
LAUNCHED_CONFIGURATIONS = ("defer 4 view", "steps 2", "bf16")

EQUAL, CLOSE, LARGER, STATED_ERROR = "equal", "close", "batch", "within"
LEFT_OUT, STOPPED, UNEQUAL, FAR, FAILED = "left out", "stopped", "RANKS DIFFER", "FAR", "FAILED"
WRONG = (UNEQUAL, FAR, FAILED)


@dataclass(frozen=True)
class Verdict:
    training: str
    way: str
    configuration: str
    verdict: str
    distance: float | None
    """Relative, from what torchrun trains; None where nothing was trained."""
    why: str = ""

    @property
    def wrong(self) -> bool:
        return self.verdict in WRONG


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    if one.keys() != other.keys():
        return float("inf")
    pairs = [(_reals(one[name]), _reals(other[name])) for name in one]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    whole = sum(float(a.square().sum()) for a, _ in pairs)
    return (apart / whole) ** 0.5 if whole else apart**0.5


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def judge(cell: Cell, name: str, ran: Ran, written: Ran, loop: Callable[[], Ran] | None = None) -> Verdict:
    """`written`: as torchrun runs it; `loop`: with so many steps in one, by the loop that a user writes."""
    configuration = Configuration(cell.configuration)

    def verdict(found: str, apart: float | None = None, why: str = "") -> Verdict:
        return Verdict(cell.training, cell.way, name, found, apart, why)

    if written.errors:
        return verdict(FAILED if not ran.errors else STOPPED, None, f"torchrun: {written.errors[0]}")
    if ran.errors:
        if why := next((e for e in ran.errors if e.startswith(ENDS_TUNING)), ""):
            return verdict(STOPPED, None, why)
        fault = next((e for e in ran.errors if not e.startswith("killed")), ran.errors[0])
        if any("has other parameters than rank 0" in error for error in ran.errors):
            return verdict(UNEQUAL, None, fault)  # the guard is the last to see what nothing here may do
        # Ours names the knob; torch's own is what a script gets that sets a static graph itself, or has such a loop.
        ends_trials = ("RuntimeError: several steps cannot be one: ", "RuntimeError: autoddp: ")
        loud = fault.startswith(("JobStops: autoddp: ", *ends_trials)) or "static_graph" in configuration
        loud = loud or (loop is not None and any(error == fault for error in loop().errors))
        # One rank has come to its end, and the other waits for it.
        loud = loud or (cell.way == HEADROOM and cell.training in SKIPS_ALONE and len(ran.errors) == 1)
        return verdict(STOPPED if loud else FAILED, None, fault)
    one, two = (found["parameters"] for found in ran.ranks)
    apart = _apart(written, ran)
    left_out = ran.ranks[0].get("left out")
    why = "; ".join(f"{knob}: {reason}" for knob, reason in (left_out or {}).items())
    why = why or "; ".join(line[len("autoddp: ") :] for line in ran.told.splitlines() if line.startswith("autoddp: "))
    on_purpose = (*DIFFER_ON_PURPOSE, *(HOLDS_LAST if cell.way == HEADROOM else ()))
    if _differ(ran) and cell.training not in on_purpose:
        return verdict(UNEQUAL, distance(one, two), why)
    if cell.way == HEADROOM:
        return verdict(LEFT_OUT if why else EQUAL, None, why)
    error = ran.ranks[0].get("error of hook")
    if error is not None and configuration.gradient_rung is Rung.NEAR:  # one step says little of error feedback
        refused = why_refused(Rung.NEAR, GradientError(**error), LIMITS)
        if refused:
            return verdict(LEFT_OUT, apart, f"the study refuses it: {refused}")
    if apart == 0.0:
        return verdict(LEFT_OUT if why else EQUAL, apart, why)
    if configuration.rung is Rung.BATCH:
        if loop is None:
            return verdict(LARGER, apart, why)
        by_hand = loop()
        if by_hand.errors:
            return verdict(FAILED, None, f"by hand: {by_hand.errors[0]}")
        if _differ(by_hand) and cell.training not in DIFFER_ON_PURPOSE:
            return verdict(LARGER, apart, "with no_sync by hand, the ranks part")
        # DDP broadcasts rank 0's buffers. Where reductions are put off too, the others get them before other passes.
        apart = _apart(by_hand, ran, 1 if "defer_reductions" in configuration else None)
        if apart == 0.0:
            return verdict(LARGER, apart, why)
    if configuration.gradient_rung is not Rung.EXACT:
        return verdict(STATED_ERROR if apart <= STATED[str(configuration["hook"])] else FAR, apart, why)
    reorders = {"defer_reductions", "threads"} & set(configuration)
    if apart > (ROUNDING if reorders else 0.0):
        return verdict(FAR, apart, why)
    return verdict(LEFT_OUT if why else CLOSE, apart, why)


def _differ(ran: Ran) -> bool:
    """Whether the ranks have other parameters."""
    one, two = (found["parameters"] for found in ran.ranks)
    return any(not torch.equal(one[key], two[key]) for key in one)


def _apart(one: Ran, other: Ran, buffers_of: int | None = None) -> float:
    """The largest relative distance, of a rank's parameters or of the buffers of the first ranks, of all without."""
    return max(
        distance(before[kind], after[kind])
        for rank, (before, after) in enumerate(zip(one.ranks, other.ranks, strict=True))
        for kind in ("parameters", "buffers")
        if before[kind] and (kind == "parameters" or buffers_of is None or rank < buffers_of)
    )


def cells(only: str, short: bool) -> list[tuple[str, Cell]]:
    """With the configuration's name."""
    trainings = SHORT_TRAININGS if short else tuple(TRAININGS)
    names = list(CONFIGURATIONS)
    found = []
    for number, training in enumerate(trainings):
        if short:  # two for each training, so that each stands beside two trainings or three
            names = [SHORT_CONFIGURATIONS[(number + more) % len(SHORT_CONFIGURATIONS)] for more in (0, 1)]
        ways = [(name, RECIPE) for name in names]
        if not short or training in SHORT_TUNED:
            ways += [(name, TUNED) for name in names if name in TURNED]
        if not short or number == 0:  # the headroom has no configuration
            ways += [(names[0], HEADROOM)]
        found += [(name, Cell(training, way, CONFIGURATIONS[name])) for name, way in ways]
    if short:
        found += [(name, Cell(training, way, CONFIGURATIONS[name])) for training, way, name in SHORT_CELLS]
    found = [(n, c) for n, c in found if not (c.way == RECIPE and NEVER_OFFERED.get(c.training, "") in c.configuration)]
    asked = [word.split("|") for word in filter(None, only.split(","))]
    return [(n, c) for n, c in found if all({c.training, c.way, n} & set(words) for words in asked)]


class Bench:
    """Runs cells, and beside them what torchrun trains; each of the latter once."""

    def __init__(self) -> None:
        self._matrix = Matrix()
        self._without: dict[tuple[Any, ...], Ran] = {}

    def judged(self, name: str, cell: Cell, ran: Ran | None = None) -> Verdict:
        """`ran`: what the cell has left, where it was launched."""
        steps = Configuration(cell.configuration).steps_per_update
        # A training that is tuned turns to the configuration and back: no loop by hand does that.
        has_loop = steps > 1 and cell.way != TUNED and cell.training not in NO_LOOP_BY_HAND
        knobs = {name: value for name, value in cell.configuration.items() if name in OF_A_LOOP}
        by_hand = (lambda: self._without_autoddp(Cell(cell.training, BY_HAND, knobs))) if has_loop else None
        ran = ran or self._matrix.run(cell)
        found = judge(cell, name, ran, self._without_autoddp(Cell(cell.training)), by_hand)
        # The guard has stopped a job whose recipe has what tuning leaves out of such a script.
        if found.verdict == UNEQUAL and found.distance is None and cell.way == RECIPE:
            left_out = self._matrix.run(replace(cell, way=TUNED)).ranks[0].get("left out")
            if left_out:
                return replace(found, verdict=STOPPED, why=f"tuning leaves out {', '.join(left_out)}; {found.why}")
        return found

    def _without_autoddp(self, plain: Cell) -> Ran:
        key = (plain.training, *sorted(plain.configuration.items()))
        if key not in self._without:
            ran = self._matrix.run(plain)
            # torch alone crashes at sparse gradients in one run of 200, in a thread of its own; its peer sees that.
            self._without[key] = self._matrix.run(plain) if ran.signals or ran.errors else ran
        return self._without[key]


def run(only: str = "", short: bool = False, tell: Any = None) -> list[Verdict]:
    bench, found = Bench(), []
    for name, cell in cells(only, short):
        found.append(bench.judged(name, cell))
        if tell is not None:
            tell(found[-1])
    return found


def run_launched(tell: Any = None) -> list[Verdict]:
    """A few cells as whole launches."""
    bench, found = Bench(), []
    with tempfile.TemporaryDirectory(prefix="equality-") as folder:
        ran = launched.run(LAUNCHED_TRAININGS, {n: CONFIGURATIONS[n] for n in LAUNCHED_CONFIGURATIONS}, Path(folder))
        for name in LAUNCHED_CONFIGURATIONS:
            for training in LAUNCHED_TRAININGS:
                found.append(bench.judged(name, Cell(training, LAUNCHED, CONFIGURATIONS[name]), ran[name][training]))
                if tell is not None:
                    tell(found[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object with all cells")
    parser.add_argument("--only", default="", help="trainings|…,ways|…,configurations|…: cells that have one of each")
    parser.add_argument("--short", action="store_true", help="the part that the tests run")
    args = parser.parse_args()
    began = time.monotonic()
    if args.short:
        shorten()
    found = run(args.only, args.short, None if args.json else _tell)
    if not args.only and not args.short:
        found += run_launched(None if args.json else _tell)
    wrong = [verdict for verdict in found if verdict.wrong]
    if args.json:
        print(json.dumps({"cells": [asdict(v) for v in found], "wrong": len(wrong)}, indent=1))
    else:
        counts = Counter(v.verdict for v in found)
        print(f"{len(found)} cells in {time.monotonic() - began:.0f} s: {dict(counts)}")
    return 1 if wrong else 0


def _tell(v: Verdict) -> None:
    apart = "" if v.distance is None else f"{v.distance:.1e}"
    print(f"{v.training:18} {v.way:10} {v.configuration:17} {v.verdict:13} {apart:8} {v.why[:150]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
