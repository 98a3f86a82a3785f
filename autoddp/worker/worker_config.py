"""What the launcher tells a worker process, in environment variables that the process removes at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TUNE, APPLY = "AUTODDP_WORKER_TUNES", "AUTODDP_WORKER_APPLIES"
"""The order's variable, by what it orders. `inject/sitecustomize.py` spells these names again: it imports nothing."""
USERS_PYTHONPATH = "AUTODDP_USERS_PYTHONPATH"
"""PYTHONPATH as the user had it, to be put back; absent if there was none."""
INJECT = Path(__file__).parent / "inject"
LAUNCHER = "AUTODDP_NAMES_ERRORS_FOR"
"""The launcher's process id: the ranks, its children, leave the cause of their end for elastic's summary."""


@dataclass(frozen=True)
class Order:
    """Either `tune` (socket and scratch are given) or apply `configuration` (they are not).

    environment = {**os.environ, **Order(...).environment(os.environ)}
    """

    socket: str = ""
    """Path of the launcher's Unix socket."""
    scratch: str = ""
    """Folder for whatever the script writes while tuning."""
    threads_pinned: str = ""
    """Why the number of threads must stay as it is; "" if it may be tuned."""
    interfaces: str = ""
    """Network interfaces, with commas, by which Gloo could reach the other nodes at once; "" if only by one."""
    measured: str = ""
    """Output folder in which `autoddp bench` may have left what the link carries."""
    accumulates: bool = False
    """Whether several steps of the script may become one."""
    cuda_graphs: bool = False
    """Whether the models may be replayed as CUDA graphs."""
    recompiles: bool = False
    """Whether what torch.compile has made may be compiled again, cut in other places."""
    configuration: dict[str, Any] = field(default_factory=dict)
    parameters_digest: str = ""
    """Of the models the configuration was measured on; another model runs as written."""
    inputs: list[str] = field(default_factory=list)
    """Of their forward passes, see `recipe.inputs`; empty: not compared."""
    recipe: str = "the recipe"
    """What messages call it."""
    note: str = ""
    """File in which to note that the recipe was made for another job; "" for none."""
    noted: str = ""
    """Beginning of that file's text."""
    variables: dict[str, str] = field(default_factory=dict)
    """What the launcher has set because of the recipe."""
    bypass: bool = False
    """Leave the reduction out: a world of one."""
    guards: bool = True
    """Whether the ranks' parameters are compared now and then, see `worker.guard`."""
    watch: dict[str, Any] = field(default_factory=dict)
    """How a near or lossy hook is watched, as `worker.gradient_monitor.WatchPlan` has it; empty: not at all."""

    def environment(self, present: Mapping[str, str]) -> dict[str, str]:
        """The variables that bring this order into every Python process started with them."""
        return {TUNE if self.socket else APPLY: json.dumps(asdict(self)), **_injection(present)}

    @classmethod
    def parse(cls, text: str) -> Order:
        """The order back from its variable."""
        return cls(**json.loads(text))


def naming_errors(present: Mapping[str, str]) -> dict[str, str]:
    """The variables under which the ranks of this process's job leave the cause of their end, see `error_file`."""
    return {LAUNCHER: str(os.getpid()), **_injection(present)}


def _injection(present: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH with `inject/` in front, and what it was."""
    theirs = present.get("PYTHONPATH")
    if theirs is None:
        return {"PYTHONPATH": str(INJECT)}
    return {USERS_PYTHONPATH: theirs, "PYTHONPATH": os.pathsep.join([str(INJECT), *([theirs] if theirs else [])])}
