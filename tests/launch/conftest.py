"""What several files of these tests share."""

from pathlib import Path

import pytest
from launchers import SEVERAL, TORCHRUN, start
from shared import once


@pytest.fixture(scope="session")
def by_torchrun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torchrun makes of every script that a test of this run compares with it: one launch, a folder each.

    A test file says which it needs in BY_TORCHRUN: a test's name → a function of its parameters, which gives commands.
    """
    needed: dict[str, None] = {}
    for item in request.session.items:
        commands_of = getattr(item.module, "BY_TORCHRUN", {}).get(item.originalname)
        if commands_of is not None:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            needed.update(dict.fromkeys(commands_of(**parameters)))

    def train(folder: Path) -> None:
        launch = start(TORCHRUN, folder / "out", ["--nproc-per-node", "2", SEVERAL, *needed]).wait()
        assert launch.returncode == 0, launch.stderr[-2000:]

    return once(tmp_path_factory, "by_torchrun", train) / "out"
