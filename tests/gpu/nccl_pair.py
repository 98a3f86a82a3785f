"""One of two NCCL ranks on one GPU: what each hook makes of gradients that differ; the first prints JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from on_gpu import layers
from share_gpu import share_gpu
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.worker.ddp.patch import Patch

STEPS = 6
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "exact": {"bucket_cap_mb": 1.0},
    "views": {"gradient_as_bucket_view": True},
    "fp16": {"hook": "fp16"},
    "bf16": {"hook": "bf16", "gradient_as_bucket_view": True},
    "powersgd": {"hook": "powersgd", "powersgd_rank": 8},
}


def main() -> None:
    share_gpu()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    rank, found = dist.get_rank(), {}
    patch = Patch()
    patch.install()
    torch.manual_seed(0)
    ddp = DDP(layers(512, 6).cuda(), device_ids=[0])
    (wrapped,) = patch.alive()
    torch.manual_seed(rank)
    inputs = [torch.randn(64, 512, device="cuda") for _ in range(STEPS)]
    for name, values in CONFIGURATIONS.items():
        wrapped.rebuild(Configuration(values), 0)
        errors = []
        for one in inputs:
            ddp.zero_grad()
            with ddp.no_sync():  # this rank's own share
                ddp(one).square().mean().backward()
            mean = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            ddp.zero_grad()
            ddp(one).square().mean().backward()
            ours = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
            errors.append(((ours - mean).norm() / mean.norm()).item())
        everyones = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, ours)
        equal = all(torch.equal(everyones[0], other) for other in everyones[1:])
        found[name] = {"error": max(errors), "ranks agree": equal}
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
