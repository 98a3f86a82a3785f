"""Print the files of autoddp that a value passes on its way, as a real run shows them.

    python tests/walks.py command-line    # from the words of a command line to what they amount to
    python tests/walks.py allow           # --allow, from the command line to the study's decision; tunes a job
    python tests/walks.py knob            # a knob, from its declaration to the live DDP object; tunes a job
    python tests/walks.py recipe          # the knob's value, from the decision into the recipe
    python tests/walks.py step            # a step's seconds, from the clock in the worker to the ladder

A file counts once a function of it is called with the value; imports do not count. A way has one direction if no file
calls one that stands before it on the way. For another walk add an entry to `WALKS`: what to run, and which calls
belong to the way.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT / 'autoddp'}{os.sep}"
ALLOWED = "lossy"  # not the default, so that no other call is mistaken for one that gets it
KNOB = "bucket_cap_mb"
# Each of 60 tensors is a bucket, so a step makes 60 reductions where one would do. Only another bucket cap gains
# much, and so it is in each configuration that may be launched.
SCRIPT = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(30))), bucket_cap_mb=0.0001)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(1, 64)).square().mean().backward()
    optimizer.step()
"""


FOLLOWED = """\
import os, sys
if os.environ["RANK"] == "0":
    sys.path.insert(0, {tests!r})
    import walks
    walks.follow({name!r}, {place!r})
"""
"""Stands before `SCRIPT` where a part of the way is in the worker."""


@dataclass(frozen=True)
class Part:
    """The part of a way in one process, and the calls there that belong to it."""

    passes: Callable[[FrameType, Sequence[Any]], list[FrameType]]
    """The frames, outermost first, that a call with these arguments, or a return with this value, adds to the way."""
    ends: tuple[str, str] = ("", "")
    """File and function: the part ends when it returns, once the value has come there. Without one, with the run."""
    begins: tuple[str, str] = ("", "")
    """File and function at whose first call the part begins; without one it is the start of the run."""


@dataclass(frozen=True)
class Walk:
    """A run, and the parts of the way of a value."""

    words: Sequence[str]
    """The command line that is run, in a folder with `SCRIPT` as train.py."""
    launcher: Part
    worker: Part | None = None
    """In rank 0 of the tuning job."""
    worker_first: bool = False


@dataclass(frozen=True)
class Call:
    """A call on the way."""

    file: str
    function: str
    caller: str
    """The file that calls; "" where it is none of the package's, or where the value is returned."""


@dataclass
class Trace:
    """Follows the calls of all threads."""

    part: Part
    keeps: Callable[[Call], None]
    """Is told of each call on the way, as long as the part lasts."""
    begun: bool = False
    reached: bool = False
    """Whether the value has come to where the part ends."""
    over: bool = False

    def __post_init__(self) -> None:
        self.begun = self.part.begins == ("", "")

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """As `sys.setprofile` wants it."""
        if self.over or event not in ("call", "return") or not file_of(frame) or _is_importing(frame):
            return
        here = (file_of(frame), frame.f_code.co_name)
        self.begun = self.begun or here == self.part.begins
        if not self.begun:
            return
        for one in self.part.passes(frame, [value] if event == "return" else list(arguments(frame).values())):
            caller = "" if event == "return" else _caller(one)
            self.keeps(Call(file_of(one), one.f_code.co_name, caller))
            self.reached = self.reached or (file_of(one), one.f_code.co_name) == self.part.ends
        self.over = self.reached and event == "return" and here == self.part.ends


def file_of(frame: FrameType) -> str:
    """The file in the package that defines the function; "" for another's. Also for a dataclass's own `__init__`."""
    path = str(frame.f_globals.get("__file__", ""))
    return path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else ""


def stack_of(frame: FrameType) -> list[FrameType]:
    """The package's frames on the stack of a call, outermost first."""
    found: list[FrameType] = []
    one: FrameType | None = frame
    while one is not None:
        if file_of(one):
            found.insert(0, one)
        one = one.f_back
    return found


def _caller(frame: FrameType) -> str:
    """The package's file that has called the function; "" for a thread's first."""
    return next((file_of(one) for one in stack_of(frame)[-2::-1]), "")


def arguments(frame: FrameType) -> dict[str, Any]:
    """What a function is called with."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    return {name: frame.f_locals[name] for name in code.co_varnames[:count] if name in frame.f_locals}


def _is_importing(frame: FrameType) -> bool:
    return any(one.f_code.co_name == "<module>" for one in stack_of(frame))


def _is_of_the_command_line(value: Any, depth: int = 2) -> bool:
    """Whether a value is the words, torchrun's part of them, or an object that holds one of these."""
    if isinstance(value, list | tuple):
        return "train.py" in value
    if isinstance(value, argparse.Namespace):
        return True
    held = getattr(value, "__dict__", {}) if type(value).__module__.startswith("autoddp") else {}
    return depth > 0 and any(_is_of_the_command_line(one, depth - 1) for one in held.values())


def _gets_the_command_line(frame: FrameType, values: Sequence[Any]) -> list[FrameType]:
    if frame.f_code.co_name == "main" or any(map(_is_of_the_command_line, values)):
        return [frame]
    return []


def _gets_allow(frame: FrameType, values: Sequence[Any]) -> list[FrameType]:
    """The whole stack of a call that gets `--allow`: in the words, as an argument, or to keep it in an object."""
    words = any(isinstance(value, list) and "--allow" in value for value in values)
    return stack_of(frame) if words or arguments(frame).get("allow") == ALLOWED else []


def _has_the_knob(value: Any, depth: int = 2) -> bool:
    """Whether a value is the knob, a setting of it, or a message or an object with one."""
    if isinstance(value, str):
        return f"\n{KNOB} = " in value  # a recipe's text
    if isinstance(value, Mapping):
        return KNOB in value
    if type(value).__name__ == "Knob":
        return bool(value.name == KNOB)
    if isinstance(value, list | tuple):
        return any(_has_the_knob(one, depth) for one in value)
    if type(value).__name__ not in ("Measure", "TrialRecord", "Standing", "Outcome", "LadderEntry", "Recipe"):
        return False
    names = getattr(value, "__struct_fields__", None) or vars(value)
    return depth > 0 and any(_has_the_knob(getattr(value, name), depth - 1) for name in names)


def _is_a_time(value: Any) -> bool:
    """Whether a value is a measured block, or holds one."""
    if type(value).__name__.endswith("Stopwatch"):
        return True
    if isinstance(value, list | tuple):
        return bool(value) and _is_a_time(value[0])
    if type(value).__name__ == "Said":
        return _is_a_time(value.message)
    return type(value).__name__ in ("BlockDone", "Block", "Standing")


def _stages(
    holds: Callable[[Any], bool], begins: Sequence[str], *stages: tuple[str, str]
) -> Callable[[FrameType, Sequence[Any]], list[FrameType]]:
    """`Part.passes` for a value that many functions look at: only who hands it on to one of these stages counts.

    A stage is a file and a function. It adds its whole stack to the way, from the first of the files `begins` on: what
    is below it runs a thread, or the script's step.
    """

    def has(value: Any) -> bool:
        try:
            return holds(value)
        except AttributeError:  # of an object that is being made
            return False

    def passes(frame: FrameType, values: Sequence[Any]) -> list[FrameType]:
        if (file_of(frame), frame.f_code.co_name) not in stages or not any(map(has, values)):
            return []
        stack = stack_of(frame)
        names = [file_of(one) for one in stack]
        return stack[min((names.index(name) for name in begins if name in names), default=0) :]

    return passes


_TUNED = ["--nproc-per-node", "2", "--trials", "4", "--allow", ALLOWED, "--tune-only", "--isolation", "off"]
_TUNED += ["--diagnose-budget", "0", "train.py"]

WALKS = {
    "command-line": Walk(["--dry-run", "--allow", ALLOWED, "train.py", "--trials", "4"], Part(_gets_the_command_line)),
    "allow": Walk(_TUNED, Part(_gets_allow, ends=("recipe/decision.py", "best_allowed"))),
    "knob": Walk(
        _TUNED,
        Part(
            _stages(
                _has_the_knob,
                ["study/trials.py", "attempts/job/live_job.py"],
                ("knobs/configuration.py", "__init__"),
                ("attempts/job/live_job.py", "__call__"),
                ("wire/messages.py", "encode"),
            ),
            begins=("study/trials.py", "run"),
            ends=("wire/messages.py", "encode"),
        ),
        Part(
            _stages(
                _has_the_knob,
                ["worker/trial/runner.py"],
                ("wire/messages.py", "receive"),
                ("worker/ddp/wrapped.py", "rebuild"),
            ),
            ends=("worker/ddp/wrapped.py", "rebuild"),
        ),
    ),
    "recipe": Walk(
        _TUNED,
        Part(
            _stages(
                _has_the_knob,
                ["study/search.py", "cli/tuned.py"],
                ("study/decision.py", "decide"),
                ("cli/tuned.py", "recipe_of"),
                ("recipe/write.py", "dump"),
                ("recipe/write.py", "save"),
            ),
            begins=("study/decision.py", "decide"),
        ),
    ),
    "step": Walk(
        _TUNED,
        Part(
            _stages(
                _is_a_time,
                ["study/search.py", "attempts/job/live_job.py"],
                ("wire/messages.py", "decode"),
                ("attempts/job/machine.py", "handle"),
                ("attempts/job/live_job.py", "__call__"),
                ("study/finals.py", "ladder_of"),
            ),
            ends=("study/finals.py", "ladder_of"),
        ),
        Part(
            _stages(
                _is_a_time,
                ["worker/observe/step_clock.py", "worker/trial/runner.py"],
                ("worker/observe/stopwatch.py", "lap"),
                ("wire/messages.py", "send"),
            ),
            ends=("wire/messages.py", "send"),
        ),
        worker_first=True,
    ),
}


def follow(name: str, place: str) -> None:
    """In a worker: leave each call of the way as a line in the file `place`, since the worker may end at any time."""
    part = WALKS[name].worker
    assert part is not None

    def keep(call: Call) -> None:
        with open(place, "a", encoding="utf-8") as file:
            file.write(f"{call.file} {call.function} {call.caller}\n")

    trace = Trace(part, keep)
    threading.setprofile(trace)
    sys.setprofile(trace)


def walked(name: str) -> list[Call]:
    """The calls on the way; the launcher runs in this process."""
    from autoddp.cli.main import main

    walk, here = WALKS[name], Path.cwd()
    way: list[Call] = []
    trace = Trace(walk.launcher, way.append)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "way.txt")
        script = FOLLOWED.format(tests=str(Path(__file__).parent), name=name, place=str(place)) if walk.worker else ""
        Path(folder, "train.py").write_text(script + SCRIPT, encoding="utf-8")
        os.chdir(folder)
        sys.argv = ["autoddp", *walk.words]
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            os.chdir(here)
        lines = place.read_text(encoding="utf-8").splitlines() if walk.worker else []
    in_worker = [Call(*line.split(" ")) for line in lines]
    assert way, "no call belongs to this walk"
    assert in_worker or not walk.worker, "no call in the worker belongs to this walk"
    assert trace.over or walk.launcher.ends == ("", ""), f"the run has ended before {walk.launcher.ends}"
    return in_worker + way if walk.worker_first else way + in_worker


def main() -> None:
    """One walk: its files in order, the function that each is entered by, and calls in the other direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walk", choices=list(WALKS))
    way = walked(parser.parse_args().walk)
    files = list(dict.fromkeys(call.file for call in way))
    back = {(one.caller, one.file) for one in way if one.caller in files[files.index(one.file) + 1 :]}
    print(f"{len(files)} files, {len(back)} calls back")
    for file in files:
        function = next(call.function for call in way if call.file == file)
        calls = ", ".join(there for here, there in back if here == file)
        print(f"    {file:30} {function}{f', calls {calls} again' if calls else ''}")


if __name__ == "__main__":
    main()
