"""What these tests share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter and list; pytest's own keep them out."""
    folder = Path(tempfile.mkdtemp(prefix="autoddp-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
