"""What several files of these tests share."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from launchers import SEVERAL, TORCHRUN, start


@pytest.fixture(scope="session")
def by_torchrun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torchrun makes of every script that a test of this run compares with it: one launch, a folder each.

    A test file says which it needs in BY_TORCHRUN: a test's name → a function of its parameters, which gives commands.
    """
    needed: dict[str, None] = {}
    for item in request.session.items:
        commands_of = getattr(item.module, "BY_TORCHRUN", {}).get(item.originalname)
        if commands_of is not None:
            needed.update(dict.fromkeys(commands_of(**item.callspec.params)))

    def train(folder: Path) -> None:
        launch = start(TORCHRUN, folder / "out", ["--nproc-per-node", "2", SEVERAL, *needed]).wait()
        assert launch.returncode == 0, launch.stderr[-2000:]

    return once(tmp_path_factory, "by_torchrun", train) / "out"


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills, once for all workers of this test run."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / name).exists():
            unfinished = base / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(base / name)
    return base / name
