"""Claim: `autoddp diagnose` names why a job is slow, on which ranks, and what mending it gives.

    python benchmarks/diagnose.py --json diagnose.json             # as root, on a quiet machine: about three hours
    python benchmarks/diagnose.py --rows rows.jsonl                # in parts: what stands in the file is not run again
    python benchmarks/diagnose.py --only straggler --clean 0       # one cause
    python benchmarks/diagnose.py --gains-only                     # only what the jobs gain when they are mended

Each script in jobs/slow/ is slow for one known reason, in two sizes. Three things are measured for each:

- the diagnosis, `autoddp diagnose --json`, `--runs` times: whether the right cause comes first, with the right ranks
- the real gain: whole jobs under torchrun, as written and `--mended`, in pairs with alternating order (AB BA …), until
  the standard error of the gain is a third of the 15 % that prices may be off, or `--most-rounds` are over
- the price in the diagnosis beside that gain, both in milliseconds of a step, with 99 % intervals

`clean.py` has no reason to be slow: a proved finding in it is wrong. Targets: the right cause first, with the right
ranks, in 95 % of the runs; prices within 15 % of the gains; no proved finding in clean jobs.

Jobs run on two ranks of this machine, or in a lab on two hosts (tests/lab.py), or with their files on a slow disk: a
loop device whose bytes per second a control group limits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common import JOBS, Hosts, Lab, Local, autoddp, options, paired, say, table, torchrun, verdict, write_json
from lab import SHAPE, unavailable
from prices import FIRST, PRICE, Priced, number

SIZES = ("small", "large")
ENDLESS = ["--steps", "1000000"]  # the diagnosis ends the job
WARMUP, STEPS = 32, 160  # whole epochs and whole periods of every job
DISK_RATES = {"read": 4_000_000, "write": 40_000_000}  # bytes per second of the slow disk
BLKIO = Path("/sys/fs/cgroup/blkio")


@dataclass(frozen=True)
class Case:
    """A job with its reason to be slow."""

    cause: str
    job: str = ""
    """The script, if it is not called as the cause is."""
    options: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (0, 1)
    """On which the cause is to be found."""
    place: str = "loopback"
    """A key of `PLACES`."""
    sizes: tuple[str, ...] = SIZES

    @property
    def command(self) -> list[str]:
        """The script and its options, without the size."""
        return [str(JOBS / "slow" / f"{self.job or self.cause}.py"), *self.options]

    def __str__(self) -> str:
        return " ".join(
            (self.job or self.cause, *self.options[1::2], *([self.place] if self.place != "loopback" else []))
        )


CASES = [
    Case("data_loader", options=("--kind", "jpeg"), sizes=("small",)),
    Case("data_loader", options=("--kind", "jpeg", "--on", "1"), ranks=(1,)),
    Case("data_loader", options=("--kind", "json", "--on", "1"), ranks=(1,)),
    Case("data_loader", options=("--kind", "disk"), place="disk"),
    Case("straggler", options=("--kind", "work"), ranks=(1,)),
    Case("straggler", options=("--kind", "neighbour"), ranks=(1,)),
    Case("straggler", options=("--kind", "memory"), ranks=(1,), sizes=("large",)),
    Case("uneven_batches"),
    Case("uneven_work", options=("--kind", "data")),
    Case("uneven_work", options=("--kind", "lock")),
    Case("exposed_communication", place="lab"),
    Case("needless_reductions", place="lab"),
    Case("no_overlap", place="lab"),
    Case("slow_link", place="networks"),
    Case("slow_link", options=("--fast", "eth0"), place="cable"),
    Case("find_unused_parameters", place="lab"),
    Case("buffer_broadcast"),
    Case("threads_oversubscribed"),
    Case("rank0_work", options=("--kind", "log"), ranks=(0,)),
    Case("rank0_work", options=("--kind", "evaluate"), ranks=(0,)),
    Case("rank0_work", options=("--kind", "save"), ranks=(0,), place="disk"),
    Case("epoch_start"),
    Case("periodic_stall", options=("--kind", "collect")),
    Case("periodic_stall", options=("--kind", "checkpoint"), place="disk"),
    Case("small_batch"),
]
CLEAN = [
    Case("clean", options=("--kind", "overlap"), ranks=()),
    Case("clean", options=("--kind", "compute"), ranks=()),
    Case("clean", options=("--kind", "loader"), ranks=()),
]
UNPRICED = {"small_batch"}


@dataclass
class Row(Priced):
    """One diagnosis beside the truth."""

    size: str = ""
    right: bool = False
    right_ranks: bool = False
    proved: list[str] = field(default_factory=list)
    """All causes that the diagnosis calls proved."""


class SlowDisk(Local):
    """Jobs whose folder and data lie on a disk of `DISK_RATES`."""

    def __init__(self, folder: Path) -> None:
        self._group = BLKIO / f"autoddp-benchmark-{os.getpid()}"
        super().__init__(folder)

    def start(self, words: Sequence[str], log: Any, printed: Any = None) -> list[subprocess.Popen[Any]]:
        """See `Local.start`."""
        enter = ["sh", "-c", f'echo $$ > {self._group}/cgroup.procs; exec "$@"', "sh"]
        return super().start([*enter, *words], log, printed)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[SlowDisk]:
        """Make the disk, and remove it in the end."""
        image = self.folder.parent / f"{self.folder.name}.image"
        with image.open("wb") as file:
            file.truncate(4_000_000_000)  # sparse; a diagnosis uses a fifth of what is free
        _shell("mkfs.ext4", "-q", "-F", str(image))
        device = _shell("losetup", "--show", "-f", str(image))
        try:
            _shell("mount", device, str(self.folder))
            self._group.mkdir()
            number = os.stat(device).st_rdev
            for way, rate in DISK_RATES.items():
                limit = f"{os.major(number)}:{os.minor(number)} {rate}"
                (self._group / f"blkio.throttle.{way}_bps_device").write_text(limit)
            yield self
        finally:
            with contextlib.suppress(OSError):
                self._group.rmdir()
            subprocess.run(["umount", "-l", str(self.folder)], check=False)
            _shell("losetup", "-d", device)
            image.unlink()


class Cable(Hosts):
    """The second host's link is ten times slower than the first's, until a job runs mended."""

    def start(self, words: Sequence[str], log: Any, printed: Any = None) -> list[subprocess.Popen[Any]]:
        """See `Local.start`."""
        rate = "1gbit" if "--mended" in words else "100mbit"
        self.lab.run(1, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, *SHAPE)
        return super().start(words, log, printed)


def _shell(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def loopback(folder: Path) -> Iterator[Local]:
    """Two ranks on this machine."""
    yield Local(folder)


@contextlib.contextmanager
def lab(folder: Path) -> Iterator[Local]:
    """Two hosts on 1 Gbit/s."""
    with Lab(2, "1gbit") as hosts:
        yield Hosts(folder, hosts)


@contextlib.contextmanager
def networks(folder: Path) -> Iterator[Local]:
    """Two hosts with two networks, the first of which is the slow one."""
    with Lab(2, "100mbit", more={"eth1": "1gbit"}) as hosts:
        yield Hosts(folder, hosts)


@contextlib.contextmanager
def cable(folder: Path) -> Iterator[Local]:
    """Two hosts, one with a link that is slower than the other's."""
    with Lab(2, "1gbit") as hosts:
        yield Cable(folder, hosts)


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Local]:
    """Two ranks on this machine, with a slow disk."""
    folder.mkdir(parents=True)
    place = SlowDisk(folder)
    with place.mounted():
        place.home(0)
        yield place


PLACES = {"loopback": loopback, "lab": lab, "networks": networks, "cable": cable, "disk": disk}


def cannot(place: str) -> str:
    """Why this machine has no such place, or ""."""
    if place == "disk":
        if os.geteuid() != 0 or not (BLKIO / "blkio.throttle.read_bps_device").exists():
            return "a slow disk needs root and the control group blkio"
        return "" if shutil.which("mkfs.ext4") and shutil.which("losetup") else "needs mkfs.ext4 and losetup"
    return "" if place == "loopback" else unavailable()


def local_ranks(here: Local) -> list[str]:
    """torchrun's options for the ranks of one host; `Hosts` puts in those of several."""
    return [] if isinstance(here, Hosts) else ["--nproc-per-node", "2"]


def real_gain(here: Local, job: Sequence[str], least: int, most: int) -> dict[str, list[float]]:
    """Seconds of a step as written and mended, in whole jobs: means, since some steps are slow on purpose."""

    def mean(*more: str) -> float:
        words = [*torchrun(*local_ranks(here)), *job, *more, "--steps", str(WARMUP + STEPS)]
        return statistics.fmean(statistics.fmean(rank[WARMUP:]) for rank in here.ranks_seconds(words))

    def known(seconds: dict[str, list[float]]) -> bool:
        gains = [before - after for before, after in zip(seconds["as written"], seconds["mended"], strict=True)]
        if len(gains) < max(2, least):
            return False
        return bool(statistics.stdev(gains) <= PRICE / 3 * statistics.fmean(gains) * len(gains) ** 0.5)

    return paired({"as written": mean, "mended": lambda: mean("--mended")}, most, known)


def diagnosed(here: Local, job: Sequence[str]) -> dict[str, Any]:
    """What `autoddp diagnose --json` prints."""
    words = [*autoddp("diagnose"), *local_ranks(here), "--json", *job, *ENDLESS]
    found: dict[str, Any] = json.loads(here.printed(words))
    return found


def measured(case: Case, size: str, folder: Path, args: Namespace) -> list[Row]:
    """Every diagnosis of one job, and its real gain."""
    with PLACES[case.place](folder) as here:
        job = [*case.command, "--size", size, *(["--data", str(here.folder)] if case.place == "disk" else [])]
        if case.place == "disk":  # what a diagnosis writes is kept apart, on another disk: so the files are made before
            here.run([*torchrun(*local_ranks(here)), *job, "--steps", "1"])
        most = args.rounds if case.cause in UNPRICED else max(args.rounds, args.most_rounds)
        seconds = {} if case in CLEAN or not args.rounds else real_gain(here, job, args.rounds, most)
        rows = [Row(str(case), case.cause, run, size=size) for run in range(args.runs)]
        for row in rows:
            if seconds:
                row.take_seconds(seconds)
            if args.gains_only:
                continue
            try:
                judge(row, case, diagnosed(here, job))
            except (RuntimeError, ValueError) as error:
                row.error = str(error)
            say(f"{case} {size}: {row.error or f'{row.first}; of this cause {row.status}, {row.ms} ms'}")
    return rows


class Rows:
    """All rows of this run, and of earlier ones that were cut off: each job's in one line of a file, if there is one.

    Rows of another commit's autoddp or jobs, of other options, and of runs that failed are measured again.
    """

    def __init__(self, path: Path | None, args: Namespace) -> None:
        self._path = path
        state = _shell("git", "-C", str(JOBS), "rev-parse", "HEAD:autoddp", "HEAD:benchmarks/jobs")
        chosen = {name: getattr(args, name) for name in ("runs", "rounds", "most_rounds", "gains_only")}
        self._same = {"state": state.split(), **chosen}
        self._kept: dict[str, list[Row]] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            found = json.loads(line)
            if found["same"] == self._same and not any(row["error"] for row in found["rows"]):
                self._kept[found["name"]] = [Row(**row) for row in found["rows"]]

    def of(self, name: str, measure: Callable[[], list[Row]]) -> list[Row]:
        """The rows of this name, from the file or measured now."""
        if name not in self._kept:
            self._kept[name] = measure()
            if self._path is not None:
                line = {"name": name, "same": self._same, "rows": [asdict(row) for row in self._kept[name]]}
                with self._path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return self._kept[name]


def judge(row: Row, case: Case, diagnosis: dict[str, Any]) -> None:
    """Fill in what the diagnosis says."""
    ours = row.take_diagnosis(diagnosis)
    row.step_ms = diagnosis["step_ms"]
    row.proved = [one["cause"] for one in diagnosis["findings"] if one["status"] == "proved"]
    row.right = row.first == case.cause
    row.right_ranks = ours is not None and tuple(ours["ranks"]) == case.ranks


def show(rows: Sequence[Row], clean: Sequence[Row]) -> dict[str, float]:
    """Print the tables, and give the figures beside the targets."""
    cells = [
        (
            row.case,
            row.size,
            "error" if row.error else row.first,
            verdict(row.right and row.right_ranks),
            row.status,
            number(row.step_ms),
            *row.cells,
        )
        for row in rows
    ]
    table(
        ("job", "size", "named first", "right, ranks too", "status", "step ms", "price ms", "gain ms", "ratio"), cells
    )
    priced = [row.ratio for row in rows if row.ratio is not None and row.cause not in UNPRICED]
    sums = {
        "right_first": statistics.fmean(row.right and row.right_ranks for row in rows) if rows else 0.0,
        "price_within": statistics.fmean(abs(one - 1) <= PRICE for one in priced) if priced else 0.0,
        "proved_in_clean": float(sum(len(row.proved) for row in clean)),
    }
    print(f"right cause first, on the right ranks: {sums['right_first']:.0%} of {len(rows)} runs (target {FIRST:.0%})")
    print(f"price within {PRICE:.0%} of the gain: {sums['price_within']:.0%} of {len(priced)} priced findings")
    failed = sum(bool(row.error) for row in clean)
    done = f"{len(clean) - failed} clean runs ({failed} failed)"
    print(f"proved findings in {done}: {sums['proved_in_clean']:.0f} (target 0)")
    for row in clean:
        if row.proved:
            print(f"    {row.case}: {', '.join(row.proved)}")
    return sums


def main() -> None:
    """Measure all jobs, print the tables."""
    parser = options(__doc__)
    parser.add_argument("--only", metavar="CAUSE,…", help="these causes (all)")
    parser.add_argument("--match", metavar="PATTERN", default="", help="jobs whose name and size match (all)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--runs", type=int, default=1, help="diagnoses of each job and size (1)")
    parser.add_argument("--rounds", type=int, default=3, help="of whole jobs, as written and mended, at least (3)")
    parser.add_argument("--most-rounds", type=int, default=8, help="of them, where the gain is not known before (8)")
    parser.add_argument("--clean", type=int, default=20, help="diagnoses of jobs that are not slow (20)")
    parser.add_argument("--rows", metavar="FILE", type=Path, help="keep the rows there, and use those it has")
    parser.add_argument("--gains-only", action="store_true", help="no diagnosis: what the jobs gain when mended")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the slow disk is removed then, too
    if args.gains_only:
        args.runs = 1
    if args.quick:
        args.sizes, args.most_rounds, args.clean = ["large"], 2, 3
    wanted = set(args.only.split(",")) if args.only else {case.cause for case in CASES}
    unknown = wanted - {case.cause for case in CASES}
    if unknown:
        parser.error(f"no such cause: {', '.join(sorted(unknown))}")
    kept = Rows(args.rows, args)
    rows: list[Row] = []
    clean: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="diagnose-") as name:
        folder = Path(name)
        for place, case in enumerate(CASES):
            if case.cause not in wanted:
                continue
            if cannot(case.place):
                say(f"left out: {case}: {cannot(case.place)}")
                continue
            for size in args.sizes:
                if size in case.sizes and re.search(args.match, f"{case} {size}"):
                    here = folder / f"{place}{size}"
                    rows += kept.of(f"{case} {size}", partial(measured, case, size, here, args))
        for run in range(0 if args.gains_only else args.clean):
            args.runs = 1
            case, here = CLEAN[run % len(CLEAN)], folder / f"clean{run}"
            clean += kept.of(f"{case} {run}", partial(measured, case, "large", here, args))
    sums = show(rows, clean)
    write_json(
        args.json, {"sums": sums, "rows": [asdict(row) for row in rows], "clean": [asdict(row) for row in clean]}
    )


if __name__ == "__main__":
    main()
