"""What test_gpu_stream_order.py runs under torch's sanitizer of streams, in a process of its own.

    TORCH_CUDA_SANITIZER=1 python ordered_streams.py cuda WHAT ...

WHAT is a hook, which trains compared with the exact mean, or "kept batches". After "unwaited" some waits of ours are
left out, so the sanitizer must find something. Prints what has ended, a line each.
"""

import contextlib
import importlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda._sanitizer import CUDASanitizerDispatchMode
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from autoddp.knobs import Configuration
from autoddp.wire.experiment import ON_DEVICE
from autoddp.worker.gradients.comparison import Comparison
from autoddp.worker.hooks import hook_for
from autoddp.worker.hooks.exact import exact_mean
from autoddp.worker.observe.loader import LoaderEvents, Loaders
from autoddp.worker.process import device as device_module

HOOKS = {
    "bf16": {"hook": "bf16"},
    "fp16": {"hook": "fp16"},
    "powersgd": {"hook": "powersgd", "powersgd_rank": 1},
    "powersgd by Cholesky": {"hook": "powersgd", "powersgd_rank": 8, "powersgd_factors": "bf16"},
    "powersgd batched": {"hook": "powersgd", "powersgd_rank": 2, "powersgd_batched": True},
}
STEPS = 6


def leave_out_collectives():
    """Make the sanitizer take no collective for a kernel.

    It takes one for a kernel of the stream on which it is called, launched when the call returns. That is behind the
    event for which NCCL's stream waits. So a hook that waits for NCCL's stream would not have waited for that kernel,
    and each hook is reported (seen on an H200). NCCL's events stay: what did not wait for them has waited for nothing.
    """
    of_torch = CUDASanitizerDispatchMode.__torch_dispatch__

    def dispatched(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            return func(*args, **(kwargs or {}))
        return of_torch(self, func, types, args, kwargs)

    CUDASanitizerDispatchMode.__torch_dispatch__ = dispatched


@contextlib.contextmanager
def at_once(device):
    """`beside_the_current_stream` without its wait."""
    with torch.cuda.stream(device_module._own_stream(device)):
        yield


def train(device, hook):
    torch.manual_seed(0)
    layers = (nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    ddp = DDP(nn.Sequential(*layers).to(device), bucket_cap_mb=0.1)
    group = dist.group.WORLD
    made = hook_for(Configuration(HOOKS[hook]), group, 0) if hook in HOOKS else (group, exact_mean)
    comparison = Comparison()
    ddp.register_comm_hook(made[0], comparison.around(made[1], group))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(STEPS):
        comparison.on = step % 2 == 1
        optimizer.zero_grad()
        ddp(torch.randn(256, 64, device=device)).square().mean().backward()
        optimizer.step()
        comparison.step()
    error = comparison.result(str, group)
    assert error is not None
    assert error.finite


def read_kept_batches(device):
    """Batches that lie on the device already are changed on a stream beside the step, as timm's loader does."""
    loaders = Loaders(LoaderEvents())
    loaders.install()
    loader = DataLoader(TensorDataset(torch.randn(64, 4096)), batch_size=8)
    loaders.keep = True
    for _ in loader:
        pass
    loaders.give_kept(True, memory=ON_DEVICE, device=device)
    total = torch.zeros(4096, device=device)
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    for (batch,) in loader:
        with torch.cuda.stream(side):  # of None: nothing
            moved = batch.to(device, non_blocking=True).sub_(0.5)
        if side is not None:
            torch.cuda.current_stream(device).wait_stream(side)
        total += moved.sum(0)
    assert loaders.gave == len(loader)


def main():
    kind, *words = sys.argv[1:]
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        leave_out_collectives()
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    for word in words:
        if word == "unwaited":
            importlib.import_module("autoddp.worker.hooks.powersgd").beside_the_current_stream = at_once
            importlib.import_module("autoddp.worker.observe.loader").ready_at_once = contextlib.nullcontext
        elif word == "kept batches":
            read_kept_batches(device)
        else:
            train(device, word)
        print(word, flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    os._exit(0)  # what is freed at the end is no part of the check


if __name__ == "__main__":
    main()
