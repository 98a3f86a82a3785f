"""What each rank of test_new_objects.py does: a script that builds a new DDP object now and then, under a recipe."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from hook_checks import CAP, COMPRESSED, SHAPES, Gradients, Targets, error, full_rank, low_rank, mean_of
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration, Rung
from autoddp.wire import WatchPlan
from autoddp.worker.ddp.model import Model
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.gradients.monitor import Watch
from autoddp.worker.hooks.powersgd import Memory

WORLD = 3
STEPS = 36
NEAR = {"rung": Rung.NEAR, "limit": 0.02, "first": 10, "every": 100, "steps": 1}
LOSSY = {"rung": Rung.LOSSY, "limit": 0.3, "first": 8, "every": 100, "steps": 4}


def cancelling(rank: int, step: int) -> Gradients:
    """Of all ranks together next to nothing is left, and bfloat16 rounds that away."""
    return [target * 1e-4 + (rank - 1) for target in low_rank(rank, step)]


class Job:
    """A process under a recipe. `run` trains, and gives the largest error of each step and what was told."""

    def __init__(self, knobs: dict[str, Any], plan: dict[str, Any] | None = None) -> None:
        self.told: list[str] = []
        self.patch.configuration = Configuration(knobs)
        self.patch.around = Watch(WatchPlan(**plan), self.told.append).around if plan else None

    patch = Patch()

    def run(self, every: int, gradients: Any, new_weights: bool = False, twins: bool = False) -> dict[str, Any]:
        rank = torch.distributed.get_rank()
        model, errors = Targets(SHAPES), []
        for step in range(STEPS):
            if step % every == 0:
                model = Targets(SHAPES) if new_weights else model
                ddp = DDP(model, bucket_cap_mb=CAP)
                beside = DDP(Targets(SHAPES), bucket_cap_mb=CAP) if twins else None
            ddp.zero_grad()
            if beside is not None:
                beside(low_rank(rank, step)).backward()
            ddp(gradients(rank, step)).backward()
            exact = mean_of(lambda r, step=step: gradients(r, step))
            made = error([value.grad for value in model.values], exact)
            errors.append(max(made[place] for place in COMPRESSED))
        return {"errors": errors, "told": self.told}


def carried_over() -> dict[str, Any]:
    """What a model keeps, over a new DDP object; and whether it goes with the model's tensors."""
    job = Job({"hook": "powersgd", "powersgd_rank": 1, "powersgd_start_step": 2})
    rank = torch.distributed.get_rank()
    model = Targets(SHAPES)
    models: list[Model] = []
    owed = []
    for _ in range(2):
        ddp = DDP(model, bucket_cap_mb=CAP)
        models.append(job.patch.of(ddp).model)
        for step in range(5):
            ddp(full_rank(rank, step)).backward()
            errors = models[-1].keep(Memory).errors
            owed.append(sum(float(stack.norm()) for stacks in errors.values() for stack in stacks))
    memory = weakref.ref(models[0].keep(Memory))
    del model, ddp, errors
    gc.collect()
    return {"same": models[0] is models[1], "owed": owed, "freed": memory() is None, "gone": not models[0].is_there}


def checks(rank: int) -> dict[str, Any]:
    Job.patch.install()
    powersgd = {"hook": "powersgd", "powersgd_rank": 1}
    found = {
        "never long enough": Job({"hook": "bf16"}, NEAR).run(7, cancelling),
        "new weights": Job({"hook": "bf16"}, NEAR).run(7, cancelling, new_weights=True),
        "again and again": Job({"hook": "bf16"}, NEAR).run(13, cancelling),
        "one step each": Job({"hook": "bf16"}, NEAR).run(1, cancelling),
        "beside another": Job({"hook": "bf16"}, NEAR).run(7, cancelling, twins=True),
        "looks over four": Job({**powersgd, "powersgd_start_step": 1}, LOSSY).run(3, full_rank),
        "begins": Job({**powersgd, "powersgd_start_step": 10}).run(9, full_rank),
        "begins anew": Job({**powersgd, "powersgd_start_step": 5}).run(9, full_rank, new_weights=True),
        "carried over": carried_over(),
    }
    Job.patch.configuration, Job.patch.around = Configuration({}), None
    return found
