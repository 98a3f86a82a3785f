"""torch.compile leaves no public trace on what it was given; ours must be right about all the ways."""

from __future__ import annotations

from typing import Any

import torch
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp import Patch


def checks(_rank: int) -> dict[str, Any]:
    patch = Patch()
    patch.install()
    part = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend="eager"))
    models = {
        "plain": DDP(nn.Linear(4, 4)),
        "inside": DDP(torch.compile(nn.Linear(4, 4), backend="eager")),
        "a part": DDP(part),
        "around": DDP(nn.Linear(4, 4)),
        "method": DDP(nn.Linear(4, 4)),
    }
    around = torch.compile(models["around"], backend="eager")
    models["method"].compile(backend="eager")
    around(torch.ones(1, 4))
    return {name: wrapped.is_compiled for name, wrapped in zip(models, patch.alive(), strict=True)}


def test_compiled_is_compiled_however_it_was_done(tmp_path: Any) -> None:
    (found,) = on_ranks(1, checks, tmp_path)
    assert found == {"plain": False, "inside": True, "a part": True, "around": True, "method": True}
