"""What the launcher tells a worker process, in an environment variable that the process removes at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from autoddp import codec
from autoddp.codec import Struct, field
from autoddp.errors import UsageError
from autoddp.knobs import AS_WRITTEN, Configuration, Rung

TUNE, APPLY = "AUTODDP_WORKER_TUNES", "AUTODDP_WORKER_APPLIES"
"""The variable, by what the worker is for. `inject/sitecustomize.py` spells these names again: it imports nothing."""
USERS_PYTHONPATH = "AUTODDP_USERS_PYTHONPATH"
"""PYTHONPATH as the user had it, to be put back; absent if there was none."""
INJECT = Path(__file__).parents[1] / "inject"
"""The folder of `sitecustomize.py`, which Python imports at its start if this folder is in PYTHONPATH."""
KEEPER = "AUTODDP_WORKER_KEEPER"
"""The keeper's process id, and the namespace that it is of: ranks of a tuning attempt do not outlive it.

Each rank removes the variable at once.
"""
LAUNCHER = "AUTODDP_NAMES_ERRORS_FOR"
"""The launcher's process id: the ranks, its children, leave the cause of their end for elastic's summary."""


class WatchPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """When the real job compares what its hook makes of the gradients with their exact mean.

    Counted in reductions: a step has one for each of its micro-batches that reduces.
    """

    rung: Rung
    limit: float
    """The largest gradient error, see `knobs.LIMITS`."""
    first: int
    """The reduction at which to look first."""
    every: int
    steps: int
    """Reductions compared at each look."""


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Either the worker tunes (`socket` and `scratch` are given), or it applies `configuration` (they are not).

    environment = {**os.environ, **WorkerConfig(...).environment(os.environ)}
    """

    socket: str = ""
    """Path of the launcher's Unix socket."""
    scratch: str = ""
    """The attempt's folder, in which each rank leaves its heartbeats."""
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
    """Whether models that torch.compile has compiled may be compiled again, split in other places."""
    diagnoses: bool = False
    """Whether a script without DDP is run too: its collectives are recorded, see `recorded_calls`."""
    local_buffers: bool = False
    """Whether each rank may keep buffers of its own."""
    static_graph: bool = False
    """Whether a static graph may be set also where the script has DDP look for unused parameters."""
    binds: str = ""
    """The device, "cpu" or "cuda", near which each rank of a script without DDP is kept; "" for no binding."""
    configuration: Configuration = AS_WRITTEN
    parameters_digest: str = ""
    """Digest of the models that the configuration was measured on; another model runs as written."""
    inputs: tuple[str, ...] = ()
    """Inputs of these models' forward passes, see `recipe.inputs`; empty: not compared."""
    backend: str = ""
    """Backend that reduced the first model's gradients; "": not compared."""
    recipe: str = "the recipe"
    """What messages call it."""
    note: str = ""
    """File in which to note that the recipe was made for another job; "" for none."""
    noted: str = ""
    """Beginning of that file's text."""
    variables: dict[str, str] = field(default_factory=dict)
    """What the launcher has set because of the recipe."""
    bypass: bool = False
    """Leave the reduction out where DDP's process group has one rank; the launcher starts no more."""
    world: int = 0
    """How many ranks the configuration is for, where torchrun may start another number; 0: for any number."""
    watch: WatchPlan | None = None
    """How a hook of the near or lossy rung is watched; None: not at all."""

    def environment(self, present: Mapping[str, str]) -> dict[str, str]:
        """The variables that bring this into every Python process started with them."""
        return {TUNE if self.socket else APPLY: codec.encode(self), **_injection(present)}

    @classmethod
    def parse(cls, text: str) -> WorkerConfig:
        """The inverse of `environment`, from the variable's value. ValueError for anything else."""
        return codec.decode(text, cls)


def near_which(devices: Sequence[str]) -> str:
    """What `WorkerConfig.binds` is in a job on these devices, see `JobFacts.devices`."""
    return "cpu" if tuple(devices) == ("cpu",) else "cuda"


def naming_errors(present: Mapping[str, str]) -> dict[str, str]:
    """The variables under which the ranks of this process's job leave the cause of their end, see `error_file`."""
    return {LAUNCHER: str(os.getpid()), **_injection(present)}


def require_injection() -> None:
    """UsageError where PYTHONPATH cannot name `inject/`: ranks would begin without the worker, and without checks."""
    if os.pathsep in str(INJECT):
        raise UsageError(
            f"autoddp is in {INJECT.parent}, and gets into the ranks by PYTHONPATH, which cannot name a path with "
            f"{os.pathsep!r} in it: move autoddp to another folder; --trials 0 is torchrun"
        )


def _injection(present: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH with `inject/` in front, and what it was."""
    theirs = present.get("PYTHONPATH")
    if theirs is None:
        return {"PYTHONPATH": str(INJECT)}
    return {USERS_PYTHONPATH: theirs, "PYTHONPATH": os.pathsep.join([str(INJECT), *([theirs] if theirs else [])])}
