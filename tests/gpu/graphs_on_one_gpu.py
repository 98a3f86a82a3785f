"""One NCCL rank trains a model of many small layers as written and with CUDA graphs; one line of JSON says how it went.

Run by test_gpu_graphs.py in a process of its own: it patches DDP, and a capture that fails may spoil the device for it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.worker.ddp.handlers import DdpHandlers
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.graphs import Graphs

WIDTH, BLOCKS, STEPS, WATCHED = 64, 30, 120, 4
COMPILED_BLOCKS = 4  # compiling thirty takes minutes
REPLAYED = Configuration({"gradient_as_bucket_view": True, "cuda_graphs": "reduce-overhead"})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.layers(x))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def train(mode: str, autocast: bool) -> dict[str, Any]:
    """Losses, and the median seconds of a step after everything has settled."""
    torch.manual_seed(0)
    patch = Patch()
    graphs, compiling = Graphs(patch.alive, lambda ddp: True), Compiling(patch.alive)
    patch.events = DdpHandlers([graphs, compiling.replays])
    patch.install()
    compiled = "compiled" in mode
    model = torch.compile(Model(COMPILED_BLOCKS).cuda()) if compiled else Model(BLOCKS).cuda()
    ddp = DDP(model, device_ids=[0], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)
    x, target = torch.randn(32, WIDTH, device="cuda"), torch.randn(32, WIDTH, device="cuda")
    losses, seconds = [], []
    graphs.watch()
    compiling.replays.watch()
    for number in range(STEPS):
        began = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = nn.functional.mse_loss(ddp(x).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        graphs.step()
        compiling.replays.step()
        if number == WATCHED:
            graphs.stop_watching()
            compiling.replays.stop_watching()
            compiling.begin()
            before = torch.cuda.memory_reserved()
            graphs.set_mode("" if compiled else mode)
            compiling.apply(REPLAYED if mode == "compiled replayed" else AS_WRITTEN)
            memory = torch.cuda.memory_reserved() - before
    compiling.replays.on = False  # the next training's patch stands around this one's
    return {
        "losses": [float(loss) for loss in losses],
        "step": statistics.median(seconds[STEPS // 2 :]),
        "replayed": graphs.replayed,
        "why_not": compiling.replays.why_not if compiled else graphs.why_not,
        "memory": memory,
    }


def main() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29534", "RANK": "0", "WORLD_SIZE": "1"}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    modes = ("", "model", "blocks", "compiled", "compiled replayed")
    found = {}
    for autocast in (False, True):
        for mode in modes:
            began, name = time.perf_counter(), f"{mode or 'eager'}{' autocast' * autocast}"
            found[name] = train(mode, autocast)
            print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
