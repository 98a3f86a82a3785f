"""One tuned run of traces in a room, and what came of each.

outcome = tune(LEVELS["overlay"], traces)
outcome.verdicts["save_over"]  # a Verdict
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from traces.frameworks import Framework
from traces.room import ORDINARY, Finished, Room
from traces.snapshot import Entry, difference
from traces.trace import Trace

HERE = Path(__file__).resolve().parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
AUTODDP = (sys.executable, "-m", "autoddp")
RANKS = ("--nproc-per-node", "2")
LATE = 2.5  # seconds: a trace's daemon writes for two
_ENDED = re.compile(r"(?:not tuned, launching as written|no recipe was written): *(.*)")
_BEGINS_OR_ENDS = re.compile(r"trace (begins|ends): (\w+) (\w+)")
Runs = Callable[[Room, Sequence[str], Mapping[str, str], float], Finished]
"""How a command is run in a room, with further variables, until it ends or patience does: `Room.run`."""


@dataclass(frozen=True)
class Level:
    """One way to be isolated. `env` are its variables, `user` whom the run belongs to."""

    name: str
    isolation: str
    user: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)


LEVELS = {
    level.name: level
    for level in (
        Level("overlay", "overlay"),
        Level("overlay-user", "overlay", user=ORDINARY),
        Level("guard", "guard"),
        Level("guard-bare", "guard", env={"AUTODDP_NO_LANDLOCK": "1"}),
    )
}


@dataclass
class Verdict:
    """What came of one trace: `kind` is one of unchanged, ended, CHANGED, WRONG, idle, skipped."""

    kind: str
    detail: str = ""
    lines: Sequence[str] = ()

    @property
    def is_bad(self) -> bool:
        return self.kind in ("CHANGED", "WRONG", "idle")

    def __str__(self) -> str:
        words = {"ended": "ended tuning", "WRONG": "the real job finds another state", "idle": "never acted"}
        return words.get(self.kind, self.kind) + (f": {self.detail}" if self.detail else "")


@dataclass
class Outcome:
    """A run: its verdicts, what changed that belongs to no trace, and why tuning ended before its time, if it did."""

    verdicts: dict[str, Verdict]
    elsewhere: Sequence[str]
    ended: str
    culprits: set[str]
    finished: Finished


def job_words(room: Room, names: Iterable[str], *more: str) -> list[str]:
    return [
        *(str(HERE / "job.py"), "--tree", str(room.work), "--out", str(room.out), "--traces", ",".join(names)),
        *more,
    ]


def autoddp_words(level: Level, room: Room, *more: str) -> list[str]:
    own = ["--output", str(room.out / "runs"), "--recipe", str(room.out / "recipe.toml")]
    return [*AUTODDP, *RANKS, "--trials", "2", "--isolation", level.isolation, *own, *more]


def tune(
    level: Level,
    traces: Sequence[Trace],
    tune_only: bool = False,
    patience: float = 120,
    more: Sequence[str] = (),
    run: Runs = Room.run,
) -> Outcome:
    """All these traces in one tuned run; `more` are further options of autoddp."""
    with Room(level.user) as room:
        room.prepare(traces)
        names = [trace.name for trace in traces]
        options = ["--tune-only"] if tune_only else []
        command = [*autoddp_words(level, room, *options, *more), *job_words(room, names)]
        return _judged(room, names, lambda: run(room, command, level.env, patience), tune_only)


def tune_framework(level: Level, one: Framework, earlier: Path | None, patience: float = 150) -> Outcome:
    """A framework's script in a tuned run, after the user's earlier job."""
    with Room(level.user) as room:
        env = {**framework_env(room, one, "real"), **level.env}
        (room.work / one.name).mkdir()
        if earlier is not None:
            for part in ("work", "home"):
                shutil.copytree(earlier / part, room.part(part), symlinks=True, dirs_exist_ok=True)
        room.settle()
        command = [*autoddp_words(level, room), str(one.script)]
        return _judged(room, [one.name], lambda: room.run(command, env, patience), False)


def framework_env(room: Room, one: Framework, mode: str) -> dict[str, str]:
    return {
        "TRACES_FOLDER": str(room.work / one.name),
        "TRACES_OUT": str(room.out),
        "TRACES_NAME": one.name,
        "TRACES_FRESH": str(int(one.is_fresh)),
        "TRACES_MODE": mode,
    }


def changes(
    before: Mapping[str, Entry], after: Mapping[str, Entry], names: Iterable[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """What differs, by trace; and what belongs to none: `work/NAME/…`, `tmp/NAME.…` are a trace's own."""
    by_trace: dict[str, list[str]] = {name: [] for name in names}
    elsewhere = []
    for line in difference(before, after):
        owner = re.split(r"[/.:]", line.split("/", 2)[1])[0] if "/" in line else ""
        by_trace.get(owner, elsewhere).append(line)
    return by_trace, elsewhere


def _judged(room: Room, names: Sequence[str], run: Callable[[], Finished], tune_only: bool) -> Outcome:
    before = room.look()
    finished = run()
    time.sleep(LATE)
    by_trace, elsewhere = changes(before, room.look(), names)
    if not tune_only:  # the real job, as under torchrun, leaves temporary folders of its own
        elsewhere = [line for line in elsewhere if not re.match("tmp/torch(elastic|inductor)_", line)]
    begun, ended = _evidence(room.out)
    match = _ENDED.search(_one_line(finished.output))
    reason = match[1] if match else ""
    if not reason and (finished.timed_out or finished.returncode != 0):
        reason = (
            "ran out of time" if finished.timed_out else f"exit code {finished.returncode}: {finished.output[-300:]}"
        )
    wrong = _wrong(room.out)
    verdicts = {}
    for name in names:
        if by_trace[name]:
            verdicts[name] = Verdict("CHANGED", lines=by_trace[name], detail=by_trace[name][0])
        elif wrong.get(name):
            verdicts[name] = Verdict("WRONG", wrong[name])
        elif name not in ended:
            verdicts[name] = Verdict("ended", reason) if reason else Verdict("idle")
        else:
            verdicts[name] = Verdict("unchanged")
    if not tune_only and not reason and not (room.out / "real-rank0.json").exists():
        reason = "the real job left no report"
    culprits = {name for name in names if name in begun and begun[name] > ended.get(name, 0)}
    return Outcome(verdicts, elsewhere, reason, culprits, finished)


def _evidence(out: Path) -> tuple[dict[str, int], dict[str, int]]:
    """How often each trace began and ended, by the ranks' logs."""
    begun: dict[str, int] = {}
    ended: dict[str, int] = {}
    for root, _, names in os.walk(out):
        for name in names:
            path = Path(root, name)
            if path.is_file() and not path.is_symlink():
                for word, trace, _ in _BEGINS_OR_ENDS.findall(path.read_text(errors="replace")):
                    counts = begun if word == "begins" else ended
                    counts[trace] = counts.get(trace, 0) + 1
    return begun, ended


def _wrong(out: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in out.glob("real-rank*.json"):
        for name, what in json.loads(path.read_text()).items():
            found[name] = found.get(name) or what
    return found


def _one_line(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
