"""What a rank does: trains by a recipe as autoddp does, and by the lines of each form; what DDP then says of itself."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from framework_job import described, network
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.own_code import lines_for
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe
from autoddp.wire import WorkerConfig
from autoddp.worker.job.applying import start_applying

STEPS = 4
RECIPE = Recipe(
    made_by=MadeBy("0.1.0", "2.13.0", "3.11.7", "2025-11-20T21:00:00Z"),
    fits=Fits(2, 1, "gloo", ("cpu",), "2.13.0", 2_000_000, "0123456789abcdef"),
    configuration=Configuration({}),
    evidence=Evidence(31.21, 0.384, 20, 6, 1234, "the best of what you allow"),
)
CONFIGURATIONS = {
    "exact": Configuration({"bucket_cap_mb": 1.0, "gradient_as_bucket_view": True, "static_graph": True}),
    "near": Configuration({"bucket_cap_mb": 2.0, "hook": "fp16"}),
}


def checks(rank: int) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # nobody listens: the group is there already
    os.environ["OMP_NUM_THREADS"] = "1"  # or Accelerate takes two, and sums are rounded in another order
    found: dict[str, Any] = {}
    for name, configuration in CONFIGURATIONS.items():
        for form in ("ddp", "accelerate"):
            found[f"{name} {form}"] = trained(by_lines(configuration, form))
    for name, configuration in CONFIGURATIONS.items():  # at last: from here on DDP is patched
        start_applying(WorkerConfig(configuration=configuration))
        found[f"{name} recipe"] = trained(DDP(network()))
    return found


def by_lines(configuration: Configuration, form: str) -> DDP:
    """The model as the lines make it, which are run as they are printed."""
    recipe = replace(RECIPE, configuration=configuration)
    names: dict[str, Any] = {"model": network()}
    exec(lines_for(recipe, "train.autoddp.toml", form).text, names)
    model = names["model"] if form == "ddp" else names["accelerator"].prepare(names["model"])
    assert isinstance(model, DDP)
    return model


def trained(model: DDP) -> dict[str, Any]:
    """What DDP says of itself after some steps, and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + torch.distributed.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, 200)).square().mean().backward()
        optimizer.step()
    return described(model)
