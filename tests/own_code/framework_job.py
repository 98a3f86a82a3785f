"""A small job of Lightning or of Transformers' Trainer; with a file of lines, built by them, else as usual.

    torchrun --nproc-per-node 2 framework_job.py lightning lines.py
    autoddp --nproc-per-node 2 framework_job.py trainer

The lines name `besides`, what such a call has beside them. Each rank leaves what DDP says of itself and the parameters
in the folder OUT.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, FEATURES = 4, 16, 200
SETTINGS = ("bucket_cap_bytes", "gradient_as_bucket_view", "static_graph", "broadcast_buffers", "bucket_sizes")
"""What DDP says of its settings."""


def network() -> nn.Module:
    """The same parameters on each rank, in each process."""
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(600, 3))


def described(model: DDP) -> dict[str, Any]:
    """What DDP says of itself, and the parameters."""
    said = model._get_ddp_logging_data()
    settings = {name: said[name] for name in SETTINGS if name in said}
    parameters = [parameter.detach().clone() for parameter in model.module.parameters()]
    return {"settings": settings, "hook": said.get("comm_hook", ""), "parameters": parameters}


def leave(model: DDP) -> None:
    torch.save(described(model), Path(os.environ["OUT"], f"rank{os.environ['RANK']}.pt"))


def inputs() -> torch.Tensor:
    return torch.randn(2 * STEPS * BATCH, FEATURES, generator=torch.Generator().manual_seed(1))


def by_lines(lines: str, besides: dict[str, Any], name: str) -> Any:
    """What the lines call `name`."""
    names: dict[str, Any] = {"besides": besides}
    exec(Path(lines).read_text(), names)
    return names[name]


def lightning(lines: str) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.network(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

        def on_train_end(self) -> None:
            leave(self.trainer.strategy.model)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    besides = {"accelerator": "cpu", "devices": 2, "max_steps": STEPS, "enable_model_summary": False, **quiet}
    trainer = by_lines(lines, besides, "trainer") if lines else Trainer(strategy=DDPStrategy(), **besides)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs()), BATCH)
    trainer.fit(Module(), loader)


def trainer(lines: str) -> None:
    from transformers import Trainer, TrainingArguments

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.network(x).square().mean()}

    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
    besides = {"output_dir": os.environ["OUT"], "use_cpu": True, "max_steps": STEPS, **quiet}
    besides |= {"per_device_train_batch_size": BATCH, "learning_rate": 0.05, "optim": "adamw_torch"}
    arguments = by_lines(lines, besides, "arguments") if lines else TrainingArguments(**besides)
    made = Trainer(Module(), arguments, train_dataset=[{"x": row} for row in inputs()])
    made.train()
    leave(made.model_wrapped)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    with contextlib.suppress(ImportError):
        import torchvision_on_cpu  # noqa: F401  (frameworks import torchvision where it is installed)
    {"lightning": lightning, "trainer": trainer}[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "")
