"""What the frameworks' scripts share.

TRACES_MODE is `earlier` (the user's job of yesterday: EARLIER steps, then it ends), `plain` (goes on for a while,
without autoddp) or `real`: the job only looks what it would go on from, by `report`, and ends. While autoddp tunes
(AUTODDP_TUNING=1) the mode is `tuned`: training goes on until tuning ends it.
"""

import contextlib
import importlib
import json
import os
from pathlib import Path

import torch
from torch import nn

with contextlib.suppress(ImportError):  # frameworks import torchvision if it is there, even one for another torch
    importlib.import_module("torchvision_on_cpu")

EARLIER, SAVE_EVERY = 20, 5
FOLDER = Path(os.environ["TRACES_FOLDER"])


def mode() -> str:
    return "tuned" if os.environ.get("AUTODDP_TUNING") == "1" else os.environ["TRACES_MODE"]


def steps() -> int:
    """At which step the job ends, counted from the very first one."""
    return {"earlier": EARLIER, "plain": 2 * EARLIER, "tuned": 1_000_000, "real": 0}[mode()]


def report(found: int, wrong: str = "") -> None:
    """The real job says at which step it would go on: 0 in a fresh folder, EARLIER after an earlier job."""
    expected = 0 if os.environ.get("TRACES_FRESH") == "1" else EARLIER
    if not wrong and found != expected:
        wrong = f"the job would go on from step {found}, not {expected}"
    if os.environ["RANK"] == "0":
        path = Path(os.environ["TRACES_OUT"]) / "real-rank0.json"
        path.write_text(json.dumps({os.environ["TRACES_NAME"]: wrong}))


def acted(what: object) -> None:
    """The evidence, in the log, that a tuned script wrote something."""
    name = os.environ["TRACES_NAME"]
    print(f"trace begins: {name} {what}\ntrace ends: {name} {what}", flush=True)


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


class Samples(torch.utils.data.Dataset):
    """As many as anybody wants."""

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return inputs, inputs[:4].argmax()


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def train(first: int, after_step) -> None:
    """The plain loop with DDP, for frameworks that have none; calls `after_step(step, ddp, optimizer)`."""
    import time

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    source = torch.Generator().manual_seed(dist.get_rank())
    for step in range(first + 1, steps() + 1):
        inputs = torch.randn(8, 16, generator=source)
        optimizer.zero_grad()
        loss(ddp(inputs), inputs[:, :4].argmax(dim=1)).backward()
        optimizer.step()
        after_step(step, ddp, optimizer)
    time.sleep(0.1)  # gloo's threads need the GIL once more, see tests/scripts/common.py
    dist.barrier()
    dist.destroy_process_group()
