"""A vision transformer on random images: plain DDP, for measuring the step, not for learning anything.

    torchrun --nproc-per-node 8 recipes/vit/train.py --model vit_l_32
    torchrun --nproc-per-node 2 recipes/vit/train.py --model tiny --steps 20

vit_l_32 has 306 million parameters but little to compute per image, so its gradients weigh heavily on the links. `tiny`
is there to try the script on a CPU. One batch is made at the start and used at every step: no data loader in the way.
"""

import argparse
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

try:
    from torchvision.models import VisionTransformer, vit_b_16, vit_b_32, vit_l_32
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that was built for another torch
    sys.exit(
        f"error: torchvision cannot be imported ({error}). HINT: pip install --no-deps torchvision==VERSION, in the "
        f"version made for your torch {torch.__version__} (0.28.0 for torch 2.13)"
    )


def tiny() -> VisionTransformer:
    """The same kind of network in 145,576 parameters, for images of 32x32."""
    return VisionTransformer(32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=128)


MODELS = {"tiny": tiny, "vit_b_16": vit_b_16, "vit_b_32": vit_b_32, "vit_l_32": vit_l_32}


def parse_args() -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="vit_b_32", help="the network (default: vit_b_32)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--steps", type=int, default=200, help="steps to run (default: 200)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 by autocast; parameters stay float32")
    parser.add_argument("--lr", type=float, default=1e-4, help="AdamW's learning rate (default: 0.0001)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the images (default: 0)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: at least 1 is needed")
    return args


def now(device: torch.device) -> float:
    """The time in seconds, once the device has done everything asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train(model: DDP, image_size: int, args: argparse.Namespace, device: torch.device) -> tuple[float, float]:
    """Run the steps; return the mean seconds of a step after the warm-up, and the last loss."""
    torch.manual_seed(args.seed + dist.get_rank())  # other images on every rank
    images = torch.randn(args.batch_size, 3, image_size, image_size, device=device)
    labels = torch.randint(0, 1000, (args.batch_size,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    warm_up = min(10, args.steps // 2)  # the first steps build buckets, allocate memory and load kernels
    started = now(device)
    for step in range(args.steps):
        if step == warm_up:
            started = now(device)
        autocast: AbstractContextManager = torch.autocast(device.type, torch.bfloat16) if args.bf16 else nullcontext()
        optimizer.zero_grad()
        with autocast:
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return (now(device) - started) / (args.steps - warm_up), loss.item()


def main() -> None:
    """Build, train, report on rank 0."""
    args = parse_args()
    use_cuda = torch.cuda.is_available()
    gpus, here = torch.cuda.device_count() if use_cuda else 0, int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if here <= gpus else "gloo")  # NCCL takes no two ranks on one GPU
    torch.manual_seed(args.seed)
    network = MODELS[args.model]().to(device)
    is_first, ranks = dist.get_rank() == 0, dist.get_world_size()
    if is_first:
        million = sum(parameter.numel() for parameter in network.parameters()) / 1e6
        print(
            f"{args.model}: {million:.1f} M parameters, {args.batch_size} images on each of {ranks} ranks", flush=True
        )
    # The DDP object must not outlive the process group: torch 2.13 on gloo may then hang while freeing it.
    seconds, loss = train(
        DDP(network, device_ids=[device.index] if use_cuda else None), network.image_size, args, device
    )
    if is_first:
        speed = args.batch_size * ranks / seconds
        print(
            f"{args.steps} steps  loss {loss:.3f}  {1000 * seconds:.1f} ms per step  {speed:.1f} images/s", flush=True
        )
    dist.barrier()  # nobody takes the process group down while others still compute: torch 2.13 may abort then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
