"""Print the files of autoddp that a value passes on its way, as a real run shows them.

    python tests/walks.py command-line    # from the words of a command line to what they amount to
    python tests/walks.py allow           # --allow, from the command line to the study's decision; tunes a job

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT / 'autoddp'}{os.sep}"
ALLOWED = "lossy"  # not the default, so that no other call is mistaken for one that gets it
SCRIPT = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(4, 1024)).square().mean().backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Walk:
    """A run, and the calls in it that belong to the way of a value."""

    words: Sequence[str]
    """The command line that is run, in a folder with `SCRIPT` as train.py."""
    passes: Callable[[FrameType], list[FrameType]]
    """The frames, outermost first, that a call adds to the way; empty for a call that does not belong to it."""
    ends: tuple[str, str] = ("", "")
    """File and function at whose first return the way has ended; without one it is the end of the run."""


@dataclass(frozen=True)
class Call:
    """A call on the way."""

    file: str
    function: str
    caller: str
    """The file that calls; "" where it is none of the package's."""


@dataclass
class Trace:
    """Follows the calls of all threads."""

    walk: Walk
    way: list[Call] = field(default_factory=list)
    """As long as the walk lasts."""
    over: bool = False

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """As `sys.setprofile` wants it."""
        if self.over or event not in ("call", "return") or not file_of(frame):
            return
        if event == "return":
            self.over = (file_of(frame), frame.f_code.co_name) == self.walk.ends
        elif not _is_importing(frame):
            self.way += [Call(file_of(one), one.f_code.co_name, _caller(one)) for one in self.walk.passes(frame)]


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


def _gets_the_command_line(frame: FrameType) -> list[FrameType]:
    if frame.f_code.co_name == "main" or any(map(_is_of_the_command_line, arguments(frame).values())):
        return [frame]
    return []


def _gets_allow(frame: FrameType) -> list[FrameType]:
    """The whole stack of a call that gets `--allow`: in the words, as an argument, or to keep it in an object."""
    given = arguments(frame)
    words = any(isinstance(value, list) and "--allow" in value for value in given.values())
    return stack_of(frame) if words or given.get("allow") == ALLOWED else []


WALKS = {
    "command-line": Walk(["--dry-run", "--allow", ALLOWED, "train.py", "--trials", "4"], _gets_the_command_line),
    "allow": Walk(
        ["--nproc-per-node", "2", "--trials", "4", "--allow", ALLOWED, "--tune-only", "train.py"],
        _gets_allow,
        ends=("recipe/decision.py", "best_allowed"),
    ),
}


def walked(walk: Walk) -> list[Call]:
    """The calls on the way, in a run in this process."""
    from autoddp.cli.main import main

    trace, here = Trace(walk), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT, encoding="utf-8")
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
    assert trace.way, "no call belongs to this walk"
    assert trace.over or walk.ends == ("", ""), f"the run has ended before {walk.ends}"
    return trace.way


def main() -> None:
    """One walk: its files in order, the function that each is entered by, and calls in the other direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walk", choices=list(WALKS))
    way = walked(WALKS[parser.parse_args().walk])
    files = list(dict.fromkeys(call.file for call in way))
    back = {(one.caller, one.file) for one in way if one.caller in files[files.index(one.file) + 1 :]}
    print(f"{len(files)} files, {len(back)} calls back")
    for file in files:
        function = next(call.function for call in way if call.file == file)
        calls = ", ".join(there for here, there in back if here == file)
        print(f"    {file:30} {function}{f', calls {calls} again' if calls else ''}")


if __name__ == "__main__":
    main()
