"""Claim: `autoddp diagnose` names why a script that communicates without DDP is slow, and what mending it gives.

    python benchmarks/diagnose_collectives.py --runs 3 --json collectives.json   # on a quiet machine: about an hour
    python benchmarks/diagnose_collectives.py --only blocking_collectives        # one cause, or one job of it
    python benchmarks/diagnose_collectives.py --rounds 0                         # without the real gains

Each cause is planted in two scripts of jobs/slow/ or more, which run on two to eight gloo ranks of this machine, or
in a lab on two hosts (tests/lab.py, as root). Three things are measured for each:

- the diagnosis, `autoddp diagnose --json`, `--runs` times: whether the right cause comes first, and how long it takes
- the real gain, by whole jobs under torchrun, before, between and behind the diagnoses, because other programs use this
  machine too; each price is compared with the mean of all of them. One start of a job differs from the next one, by a
  quarter for some: so one start is a pair, in which 30 steps as written and 30 mended take turns. Where the
  mend cannot be made while the job runs, a pair is two starts
- the price in the diagnosis beside that gain, both in milliseconds of a step, with 99 % intervals

`clean_collectives.py` has no reason to be slow: any finding in it is wrong. Targets: the right cause first in 95 % of
the runs, prices within 15 % of the gains, no finding in clean jobs, each answer within a minute.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import JOBS, Hosts, Lab, Local, autoddp, options, paired, say, table, torchrun, verdict, write_json
from lab import unavailable
from prices import FIRST, PRICE, Priced, number

LIMIT = 60.0  # seconds in which an answer has to be there
WARMUP = 0.2  # of the steps of a job, which do not count
TURN, SETTLING = 30, 10  # steps of a part as written or mended, and of these the first ones, which do not count
ENDLESS = 10**7  # steps of a job that is diagnosed: it is ended when it has been seen for long enough


@dataclass(frozen=True)
class Case:
    """A script with its reason to be slow, or with none."""

    cause: str
    """The finding that is right; "" for none."""
    kind: str
    ranks: int
    steps: int
    """For about six seconds as written."""
    hosts: int = 1
    """Of a lab, with a slow network and a fast one, where there are several."""
    in_turns: bool = True
    """Whether the mend can be made, and taken back, while the job runs."""

    @property
    def name(self) -> str:
        """Cause and kind, as `--only` takes them."""
        return f"{self.cause or 'clean'} {self.kind}"

    @property
    def command(self) -> list[str]:
        """torchrun's option, the script and its options, but for the number of steps."""
        script = JOBS / "slow" / f"{self.cause or 'clean_collectives'}.py"
        each = str(self.ranks // self.hosts)
        return ["--nproc-per-node", each, str(script), "--kind", self.kind]


CASES = [
    Case("small_collectives", "gradients", 2, 90),
    Case("small_collectives", "statistics", 4, 150),
    Case("blocking_collectives", "gradients", 2, 120),
    Case("blocking_collectives", "weights", 2, 90),
    Case("too_many_groups", "halves", 4, 120),
    # As many as are recorded: each group makes the next one slower.
    Case("too_many_groups", "metrics", 2, 350, in_turns=False),
    Case("oversubscribed_cores", "threads", 2, 90),
    Case("oversubscribed_cores", "pairs", 8, 60, in_turns=False),
    Case("waiting_for_rank", "work", 4, 150),
    Case("waiting_for_rank", "log", 2, 220),
    Case("waiting_for_rank", "stages", 4, 120),
    Case("object_collectives", "gather", 2, 800),
    Case("object_collectives", "broadcast", 4, 800),
    Case("scalar_collectives", "several", 2, 600),
    Case("scalar_collectives", "loss", 4, 800),
    Case("needless_barriers", "times", 4, 400),
    Case("needless_barriers", "log", 2, 800),
    Case("wrong_interface", "gradients", 2, 50, hosts=2, in_turns=False),
    Case("wrong_interface", "pieces", 2, 50, hosts=2, in_turns=False),
]
CLEAN = [
    Case("", "zero", 2, 250),
    Case("", "muon", 4, 250),
    Case("", "pipeline", 4, 150),
    Case("", "ring", 4, 250),
    Case("", "local", 2, 250),
    Case("", "metrics", 4, 250),
    Case("", "overlap", 2, 150),
    Case("", "tensor", 2, 100),
    Case("", "grid", 4, 150),
    Case("", "epochs", 2, 250),
]


@dataclass
class Row(Priced):
    """One diagnosis beside the truth."""

    took: float = 0.0
    """Seconds from the command to the answer."""

    @property
    def right(self) -> bool:
        """Whether the right cause comes first, or nothing was found in a clean job."""
        return not self.error and self.first == self.cause

    @property
    def ratio_of_shares(self) -> float | None:
        """Price by the diagnosed step, as a multiple of gain by step: one start may be slower than another."""
        found = self.diagnosis.get("communication", {})
        if self.ratio is None or self.step_ms is None or found.get("unit") != "step":  # else `in_steps` has done it
            return self.ratio
        return self.ratio * self.step_ms / float(found["step_ms"])


def real_gain(here: Local, case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step as written and mended, in `rounds` pairs; the mean of the rank that takes longest."""
    if case.in_turns:
        return by_turns(here, case, rounds)

    def mean(*more: str) -> float:
        of_ranks = here.ranks_seconds([*torchrun(), *case.command, "--steps", str(case.steps), *more])
        return of_slowest([steps[round(WARMUP * len(steps)) :] for steps in of_ranks if steps])

    return paired({"as written": mean, "mended": lambda: mean("--mended")}, rounds)


def by_turns(here: Local, case: Case, rounds: int) -> dict[str, list[float]]:
    """See `real_gain`: each pair is one job of twice as many steps."""
    parts = 2 * round(case.steps / TURN) + 1  # the first one, as written, warms the job up
    words = [*torchrun(), *case.command, "--steps", str(parts * TURN), "--turns", str(TURN)]
    found: dict[str, list[float]] = {"as written": [], "mended": []}
    for start in range(rounds):
        of_ranks = here.ranks_seconds(words)
        for name, first in (("mended", TURN), ("as written", 2 * TURN)):
            counted = range(first, parts * TURN, 2 * TURN)
            found[name].append(of_slowest([_of_parts(steps, counted) for steps in of_ranks]))
        shown = "  ".join(f"{name} {seconds[-1] * 1e3:.1f} ms" for name, seconds in found.items())
        say(f"start {start + 1}/{rounds}: {shown}")
    return found


def _of_parts(steps: Sequence[float], begins: Sequence[int]) -> list[float]:
    """The steps of all parts that begin there, without the first ones of each."""
    return [one for begin in begins for one in steps[begin + SETTLING : begin + TURN]]


def of_slowest(of_ranks: Sequence[Sequence[float]]) -> float:
    """The mean of the steps of the rank that takes longest."""
    return max(map(statistics.fmean, of_ranks))


def diagnosed(here: Local, case: Case, row: Row) -> None:
    """Fill in what `autoddp diagnose --json` says."""
    began = time.monotonic()
    endless = [*case.command, "--steps", str(ENDLESS)]
    try:
        row.take_diagnosis(json.loads(here.printed([*autoddp("diagnose", "--json"), *endless])))
    except (RuntimeError, ValueError) as error:
        row.error = str(error)
        return
    row.took = time.monotonic() - began


def measured(case: Case, folder: Path, args: Namespace) -> list[Row]:
    """Every diagnosis of one job, and its real gain."""
    with place(case, folder) as here:
        return measured_at(here, case, args)


@contextlib.contextmanager
def place(case: Case, folder: Path) -> Iterator[Local]:
    """Where the job runs."""
    if case.hosts == 1:
        yield Local(folder)
        return
    with Lab(case.hosts, "100mbit", more={"eth1": "1gbit"}) as lab:
        yield Hosts(folder, lab)


def measured_at(here: Local, case: Case, args: Namespace) -> list[Row]:
    """See `measured`."""
    rows = [Row(case.name, case.cause, run) for run in range(args.runs)]
    has_gain = bool(case.cause and args.rounds)
    gains = [real_gain(here, case, args.rounds)] if has_gain else []
    for row in rows:
        diagnosed(here, case, row)
        say(f"{case.name}: {row.error or f'first {row.first or None}; of the cause {row.status}, {row.ms} ms'}")
        if has_gain:
            gains.append(real_gain(here, case, args.rounds))
    if gains:
        seconds = {name: [second for gain in gains for second in gain[name]] for name in gains[0]}
        for row in rows:
            row.take_seconds(seconds)
            in_steps(row)
    return rows


def in_steps(row: Row) -> None:
    """Make the price one of a step of the job, where the diagnosis could tell only single calls or seconds."""
    found = row.diagnosis.get("communication", {})
    if row.ms is None or found.get("unit") == "step":
        return
    assert row.step_ms is not None
    steps = row.step_ms / found["step_ms"]
    row.ms *= steps
    if row.low is not None and row.high is not None:  # an uncertain price has no ends
        row.low, row.high = row.low * steps, row.high * steps


def show(rows: Sequence[Row]) -> dict[str, float]:
    """Print the tables, and give the figures beside the targets."""
    planted, clean = [row for row in rows if row.cause], [row for row in rows if not row.cause]
    cells = [
        (
            row.case,
            row.first or "nothing",
            row.status,
            number(row.step_ms),
            *row.cells,
            "" if row.ratio_of_shares is None else f"{row.ratio_of_shares:.2f}",
            f"{row.took:.0f}",
            verdict(row.right),
        )
        for row in rows
    ]
    head = (
        "planted",
        "first finding",
        "status",
        "step ms",
        "price ms",
        "gain ms",
        "ratio",
        "of shares",
        "seconds",
        "right",
    )
    table(head, cells)
    ratios = [row.ratio for row in planted if row.ratio is not None]
    of_shares = [row.ratio_of_shares for row in planted if row.ratio_of_shares is not None]
    sums = {
        "right_first": statistics.fmean(row.right for row in planted) if planted else 0.0,
        "price_within": statistics.fmean(abs(one - 1) <= PRICE for one in ratios) if ratios else 0.0,
        "share_within": statistics.fmean(abs(one - 1) <= PRICE for one in of_shares) if of_shares else 0.0,
        "found_in_clean": float(sum(not row.right for row in clean)),
        "longest": max((row.took for row in rows), default=0.0),
    }
    print(f"right cause first: {sums['right_first']:.0%} of {len(planted)} runs (target {FIRST:.0%})")
    print(f"price within {PRICE:.0%} of the gain: {sums['price_within']:.0%} of {len(ratios)} (target 100%)")
    print(f"the same of their shares of the step: {sums['share_within']:.0%} of {len(of_shares)}")
    print(f"clean runs with a finding or an error: {sums['found_in_clean']:.0f} of {len(clean)} (target 0)")
    print(f"longest diagnosis: {sums['longest']:.0f} s (target {LIMIT:.0f})")
    for row in rows:
        if not row.right:
            print(f"    {row.case}: {row.error or '; '.join(row.diagnosis['verdict'])}")
    return sums


def main() -> None:
    """Diagnose all jobs, print the tables; exit code 1 if a job got the wrong answer."""
    parser = options(__doc__)
    parser.add_argument("--only", metavar="NAME,…", default="", help="causes, or jobs such as 'clean zero' (all)")
    parser.add_argument("--runs", type=int, default=1, help="diagnoses of each job (1)")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of whole jobs before and after each diagnosis (2)")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 0
    wanted = [name for name in args.only.split(",") if name]
    every = [*CASES, *CLEAN]
    unknown = [name for name in wanted if not any(name in (case.name, case.cause or "clean") for case in every)]
    if unknown:
        parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(case.name for case in every)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="collectives-") as name:
        for place_number, case in enumerate(every):
            if wanted and case.name not in wanted and (case.cause or "clean") not in wanted:
                continue
            if case.hosts > 1 and unavailable():
                say(f"left out: {case.name}: {unavailable()}")
                continue
            rows += measured(case, Path(name) / str(place_number), args)
    sums = show(rows)
    write_json(args.json, {"sums": sums, "rows": [asdict(row) for row in rows]})
    sys.exit(not all(row.right for row in rows))


if __name__ == "__main__":
    main()
