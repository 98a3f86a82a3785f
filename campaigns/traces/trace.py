"""What a trace is, and the list of all.

    @trace(prepare=checkpoint("last.pt"))
    def remove_then_save(folder, rank, step):
        ...

`prepare(folder)` makes what is precious to the user, before autoddp runs, in the process of the test. The function
itself, `act(folder, rank, step)`, runs inside the training script, between steps, `ROUNDS` times (step 0, 1, 2).
`after(folder)` says what the real job must find when it starts; it fails by an AssertionError.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROUNDS = 3  # enough for a rotation that keeps two
FIRST, EVERY = "first", "every"

Prepare = Callable[[Path], None]
Act = Callable[[Path, int, int], None]
After = Callable[[Path], None]


@dataclass(frozen=True)
class Trace:
    """One way of touching files. `where` is how `act` is told its folder, see `trace`."""

    name: str
    family: str
    act: Act
    prepare: Prepare
    after: After | None
    ranks: str
    where: str
    modules: Sequence[str]
    programs: Sequence[str]
    root: bool
    says: str

    def missing(self) -> str:
        """Why this trace cannot run here, or nothing."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"needs the Python package {module}"
        for program in self.programs:
            if shutil.which(program) is None:
                return f"needs the program {program}"
        return ""


TRACES: dict[str, Trace] = {}
PREPARING = threading.local()  # `tops`: where the places are, as seen by the thread that prepares a run


def nothing(folder: Path) -> None:
    """The user has nothing there yet."""


def trace(
    *,
    prepare: Prepare = nothing,
    after: After | None = None,
    ranks: str = FIRST,
    where: str = "absolute",
    modules: Sequence[str] = (),
    programs: Sequence[str] = (),
    root: bool = False,
) -> Callable[[Act], Act]:
    """Add a trace to the list. It acts on rank 0, or on all (`ranks=EVERY`).

    Its folder is an absolute path, or `relative` to where the job was started, or `inside`: the job changes into it.
    `modules` and `programs` are what it needs; `root` says that an ordinary user may not do it.
    """

    def register(act: Act) -> Act:
        family = act.__module__.rpartition(".")[2]
        assert act.__name__ not in TRACES, f"two traces are named {act.__name__}"
        TRACES[act.__name__] = Trace(
            name=act.__name__,
            family=family,
            act=act,
            prepare=prepare,
            after=after,
            ranks=ranks,
            where=where,
            modules=tuple(modules),
            programs=tuple(programs),
            root=root,
            says=(act.__doc__ or "").strip().splitlines()[0],
        )
        return act

    return register


def load() -> dict[str, Trace]:
    """All traces, by name, in the order of their files."""
    for path in sorted((Path(__file__).parent / "cases").glob("*.py")):
        if path.stem != "__init__":
            importlib.import_module(f"traces.cases.{path.stem}")
    return TRACES


def place(kind: str, folder: Path) -> Path:
    """This trace's own folder in `tmp`, `shm`, `home` or `elsewhere` (outside the working folder).

    The test prepares it where the job will see it: the job may have a /tmp of its own, see room.py.
    """
    if tops := getattr(PREPARING, "tops", None):
        return Path(tops[kind]) / folder.resolve().name
    default = {"tmp": "/tmp", "shm": "/dev/shm", "home": str(Path.home())}
    top = os.environ.get(f"TRACES_{kind.upper()}") or default[kind]
    return Path(top) / folder.resolve().name


def both(*parts: Prepare) -> Prepare:
    """One after the other."""

    def prepare(folder: Path) -> None:
        for part in parts:
            part(folder)

    return prepare


def checkpoint(*names: str) -> Prepare:
    """Checkpoints as the user's own earlier job left them: `owner` says so, `epoch` is 3."""

    def prepare(folder: Path) -> None:
        import torch

        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"owner": "user", "epoch": 3, "model": {"weight": torch.full((64,), 3.0)}}, path)

    return prepare


def text(**contents: str) -> Prepare:
    """Text files; `__` in a name stands for a full stop, `log__txt="..."`."""

    def prepare(folder: Path) -> None:
        for name, content in contents.items():
            (folder / name.replace("__", ".")).write_text(content)

    return prepare


def files(*names: str) -> Prepare:
    """Files with some lines each."""

    def prepare(folder: Path) -> None:
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{name}: line {number} of the user\n" for number in range(40)))

    return prepare


def is_users(*names: str) -> After:
    """The real job finds the checkpoints of `checkpoint`, not what a tuning run wrote."""

    def after(folder: Path) -> None:
        import torch

        for name in names:
            found = torch.load(folder / name)
            assert found["owner"] == "user", f"{name} was written by {found['owner']}"
            assert found["epoch"] == 3, f"{name} is of epoch {found['epoch']}"

    return after


def only(*names: str) -> After:
    """The real job finds these names in the folder, and no other."""

    def after(folder: Path) -> None:
        found = sorted(path.name for path in folder.iterdir())
        assert found == sorted(names), f"the folder has {found}"

    return after


def state(step: int) -> dict[str, object]:
    """What a training script saves: unlike everything that `checkpoint` prepared."""
    import torch

    return {"owner": "job", "epoch": 100 + step, "model": {"weight": torch.full((64,), float(step))}}
