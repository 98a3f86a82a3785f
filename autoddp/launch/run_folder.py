"""The folder of one tuning run: `.autoddp/<date>-<pid>/`, with logs, journal, scratch and summary.json."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from autoddp.errors import UsageError


class RunFolder:
    """Made at once, so that an unwritable place is an error before anything is started."""

    def __init__(self, output: Path) -> None:
        self.path = (output / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise UsageError(
                f"--output {output}: cannot be written ({error.strerror}); name a folder that can"
            ) from None
        # A Unix socket's path may have 107 bytes at most; the output folder's may be longer.
        self._private = tempfile.mkdtemp(prefix="autoddp-")

    @property
    def socket(self) -> str:
        """Path of the worker's socket."""
        return os.path.join(self._private, "s")

    @property
    def journal(self) -> Path:
        """One line for each measurement."""
        return self.path / "journal.jsonl"

    @property
    def summary(self) -> Path:
        """All of a study, for programs."""
        return self.path / "summary.json"

    @property
    def previous_recipe(self) -> Path:
        """Where a recipe goes that is about to be replaced."""
        return self.path / "previous.autoddp.toml"

    def scratch(self, number: int) -> Path:
        """Where the script's writes go in pass `number`."""
        folder = self.path / f"pass{number}" / "scratch"
        (folder / "heartbeats").mkdir(parents=True)
        return folder

    def clean(self) -> None:
        """Remove what nobody needs once tuning is over: the socket, and whatever the script wrote while tuning."""
        shutil.rmtree(self._private, ignore_errors=True)
        for scratch in self.path.glob("pass*/scratch"):
            shutil.rmtree(scratch, ignore_errors=True)
