"""A start of a script under `--objective steps`, without processes: `one_start(folder, needed={0: 8})`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autoddp.attempts.isolating import Isolation
from autoddp.attempts.job.deadline import Deadline
from autoddp.attempts.limits import Written
from autoddp.attempts.starts.one_start import OneStart
from autoddp.attempts.starts.progress import StepsMade
from autoddp.hosts.together import Hosts
from autoddp.settings import Objective


def one_start(folder: Path, **fields: Any) -> OneStart:
    """The first start, on one host and without a limit of time, but for the `fields` that are given."""
    usual: dict[str, Any] = {
        "objective": Objective.parse("steps"),
        "progress": StepsMade(folder),
        "needed": None,
        "deadline": Deadline(None, by_length=False),
        "written": Written(Isolation.off(SimpleNamespace(path=folder)), "tuning"),  # type: ignore[arg-type]
        "patience": 60.0,
        "folder": folder,
        "words": "as written",
        "hosts": Hosts(),
        "number": 0,
    }
    return OneStart(**{**usual, **fields})
