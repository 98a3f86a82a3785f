"""The published job of experiment B: ViT-L/32 on images that the data set makes, with the settings given by hand.

    torchrun --nproc-per-node 8 vision.py --bucket-cap-mb 2000 --times times.json
    torchrun --nproc-per-node 2 tests/run_with_torchvision.py vision.py --model tiny --batch 8 --workers 1  # on a CPU

SGD, `zero_grad` before the backward pass, 8 loader workers, pinned memory, copies that do not block.
"""

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.models import VisionTransformer, vit_b_32, vit_l_32

COUNT = 100_000


def tiny() -> VisionTransformer:
    """A network of the same kind with 3.2 million parameters, for images of 32×32."""
    return VisionTransformer(32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=256, mlp_dim=1024)


MODELS = {"tiny": tiny, "vit_b_32": vit_b_32, "vit_l_32": vit_l_32}


class Images(Dataset[tuple[Tensor, int]]):
    """Random images, made when they are asked for."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.rand(3, self.side, self.side), number % 1000


def parse_args() -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="vit_l_32")
    parser.add_argument("--batch", type=int, default=32, help="images on each rank (32)")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--alone", action="store_true", help="without DDP")
    parser.add_argument("--no-sync", action="store_true", help="with DDP that never reduces")
    parser.add_argument("--bucket-cap-mb", type=float)
    parser.add_argument("--static-graph", action="store_true")
    parser.add_argument("--bucket-view", action="store_true")
    parser.add_argument("--hook", choices=("bf16", "powersgd"))
    parser.add_argument("--times", metavar="FILE", help="rank 0 writes the seconds of every rank's steps here")
    return parser.parse_args()


def narrow(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP asks for this very annotation
) -> torch.futures.Future[Tensor]:
    """torch's bf16_compress_hook for gloo, which torch refuses by the hook's name."""
    found: torch.futures.Future[Tensor] = bf16_compress_hook(group, bucket)
    return found


def wrap(network: nn.Module, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """DDP with what the options ask for, or none."""
    if args.alone:
        return network
    given: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" else {}
    if args.bucket_cap_mb is not None:
        given["bucket_cap_mb"] = args.bucket_cap_mb
    model = DDP(network, static_graph=args.static_graph, gradient_as_bucket_view=args.bucket_view, **given)
    if args.hook == "bf16":
        model.register_comm_hook(dist.group.WORLD, bf16_compress_hook if device.type == "cuda" else narrow)
    elif args.hook == "powersgd":
        # 10 and not torch's 1000: the steps that are measured must be compressed.
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, 1, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def train(model: nn.Module, side: int, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Seconds of each step."""
    images = Images(side)
    pinned = device.type == "cuda"
    more = {"num_workers": args.workers, "pin_memory": pinned}
    loader = DataLoader(images, args.batch, sampler=DistributedSampler(images), drop_last=True, **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds: list[float] = []
    ended = time.perf_counter()
    for inputs, targets in loader:
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with model.no_sync() if isinstance(model, DDP) and args.no_sync else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds.append(now - ended)
        ended = now
        if len(seconds) == args.steps:
            break
    return seconds


def main() -> None:
    """Train, then leave the times."""
    args = parse_args()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    network = MODELS[args.model]().to(device)
    seconds = train(wrap(network, args, device), network.image_size, args, device)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    if args.times and dist.get_rank() == 0:
        Path(args.times).write_text(json.dumps(everyone), encoding="utf-8")
    dist.barrier()
    # Not through the interpreter's own end: a thread of torch 2.13's gloo that waits for the GIL may abort there.
    os._exit(0)


if __name__ == "__main__":
    main()
