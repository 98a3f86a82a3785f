"""DDP's warnings name the line of the script that has caused them, under a recipe too."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.worker.ddp.patch import Patch


class Derived(DDP):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, check_reduction=True)


def builds(rank: int) -> dict[str, Any]:
    patch = Patch()
    patch.configuration = Configuration({"gradient_as_bucket_view": True})
    patch.install()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        DDP(nn.Linear(2, 2), check_reduction=True)
        Derived(nn.Linear(2, 2))
    return {"seen": [(one.filename, str(one.message)) for one in seen]}


def test_a_warning_names_the_line_that_builds_the_object(tmp_path: Path) -> None:
    for found in on_ranks(2, builds, tmp_path):
        assert [name for name, text in found["seen"] if "check_reduction" in text] == [__file__] * 2
