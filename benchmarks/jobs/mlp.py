"""A plain DDP job: a multilayer perceptron on random data, 6.3 million parameters unless asked otherwise.

    torchrun --nproc-per-node 2 jobs/mlp.py --steps 50 --times times.json

It times its own steps, from the batch to the end of step(), and knows nothing of any launcher. The options from
--bucket-cap-mb on are DDP settings written by hand, for comparison with the same settings from elsewhere.
"""

import argparse
import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


def parse_args() -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--launched", type=int, metavar="N", help="but N at most where autoddp does not tune")
    parser.add_argument("--width", type=int, default=1024, help="of every layer (1024)")
    parser.add_argument("--depth", type=int, default=6, help="number of layers (6)")
    parser.add_argument("--batch", type=int, default=32, help="rows per rank and step (32)")
    parser.add_argument("--micro-batches", type=int, default=1, help="backward passes per step, each reduces (1)")
    parser.add_argument("--no-sync", action="store_true", help="by hand: only the last one reduces")
    parser.add_argument("--workers", type=int, default=0, help="processes of a DataLoader for the batches (none)")
    parser.add_argument("--batch-ms", type=float, default=0.0, help="milliseconds that a worker needs for a batch")
    parser.add_argument("--save", metavar="FILE", help="rank 0 writes the trained parameters here")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--times", metavar="FILE", help="rank 0 writes the seconds of every rank's steps here")
    parser.add_argument("--bucket-cap-mb", type=float, help="by hand: MiB per bucket")
    parser.add_argument("--bucket-view", action="store_true", help="by hand: gradient_as_bucket_view=True")
    parser.add_argument("--bf16", action="store_true", help="by hand: a hook that sends bfloat16")
    args = parser.parse_args()
    if args.launched is not None and "AUTODDP_TUNING" not in os.environ:
        args.steps = min(args.steps, args.launched)
    return args


def build_network(width: int, depth: int) -> nn.Module:
    """`depth` square layers with ReLU between them."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def bf16_hook(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP asks for this very annotation
) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16_compress_hook in our own words, since that one refuses gloo by its name."""
    buffer = bucket.buffer()
    narrow = buffer.div_(group.size()).to(torch.bfloat16)
    work = dist.all_reduce(narrow, group=group, async_op=True)
    sent: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda one: buffer.copy_(one.value()[0]))
    return sent


def wrap(network: nn.Module, args: argparse.Namespace, device: torch.device) -> DDP:
    """DDP as a script has it: without an argument unless the options ask for one."""
    given: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" else {}
    if args.bucket_cap_mb is not None:
        given["bucket_cap_mb"] = args.bucket_cap_mb
    if args.bucket_view:
        given["gradient_as_bucket_view"] = True
    model = DDP(network, **given)
    if args.bf16:
        model.register_comm_hook(dist.group.WORLD, bf16_hook)
    return model


class SlowBatches(IterableDataset[Tensor]):
    """Batches for ever, each after so many seconds: a worker that waits for files takes no core from the ranks."""

    def __init__(self, batch: Tensor, seconds: float) -> None:
        self.batch, self.seconds = batch, seconds

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            time.sleep(self.seconds)
            yield self.batch


def batches_of(inputs: Tensor, args: argparse.Namespace) -> Iterator[Tensor]:
    """The inputs again and again, at once or as the loader gives them."""
    if not args.workers:
        return itertools.repeat(inputs)
    data = SlowBatches(inputs.cpu(), args.batch_ms / 1e3)
    return iter(DataLoader(data, batch_size=None, num_workers=args.workers))


def train(model: DDP, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Seconds of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    source = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(args.batch, args.width, generator=source).to(device)
    targets = torch.randn(args.batch, args.width, generator=source).to(device)
    batches, seconds = batches_of(inputs, args), []
    for _ in range(args.steps):
        began = time.perf_counter()
        inputs = next(batches).to(device)
        optimizer.zero_grad()
        for micro in range(args.micro_batches):
            skips = args.no_sync and micro + 1 < args.micro_batches
            with model.no_sync() if skips else contextlib.nullcontext():
                nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Train, then leave the times."""
    args = parse_args()
    dist.init_process_group(args.backend)
    torch.manual_seed(0)
    use_cuda = args.backend == "nccl"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    # The DDP object must not outlive the process group: torch 2.13 on gloo may then hang while freeing it.
    network = build_network(args.width, args.depth).to(device)
    seconds = train(wrap(network, args, device), args, device)
    if args.save and dist.get_rank() == 0:
        torch.save(network.state_dict(), args.save)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    if args.times and dist.get_rank() == 0:
        with open(args.times, "w", encoding="utf-8") as file:
            json.dump(everyone, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Not through the interpreter's own end: a thread of torch 2.13's gloo that waits for the GIL may abort there.
    os._exit(0)
