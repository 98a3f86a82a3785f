"""Rank 0 alone does something between two steps, and the others wait for it at the next reduction.

torchrun --nproc-per-node 2 rank0_work.py --kind log       # after each step: statistics of all parameters, as JSON
torchrun --nproc-per-node 2 rank0_work.py --kind evaluate  # after every 10th step: a pass over the validation data
torchrun --nproc-per-node 2 rank0_work.py --kind save      # after every 10th step: a checkpoint, synchronised to disk

Mended: without it.
"""

from __future__ import annotations

import json
import os
from typing import Any

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROUNDS = {"small": 6, "large": 18}  # of the statistics, about 2 ms each
BATCHES = {"small": 2, "large": 14}  # of the validation data, 27 ms each
MEGABYTES = {"small": 4, "large": 16}  # of the checkpoint


def log(network: nn.Module, rounds: int, file: Any) -> None:
    """The distribution of each parameter."""
    for _ in range(rounds):
        found = {}
        for name, parameter in network.named_parameters():
            values = parameter.detach()
            found[name] = [float(values.mean()), float(values.std()), *torch.histc(values, 32).tolist()]
        file.write(json.dumps(found) + "\n")
        file.flush()


def evaluate(network: nn.Module, batches: int) -> float:
    """The loss of the validation data."""
    network.eval()
    total = 0.0
    with torch.no_grad():
        for _ in range(batches):
            total += float(network(torch.randn(8, 256)).square().mean())
    network.train()
    return total


def save(network: nn.Module, megabytes: int) -> None:
    """A checkpoint with the optimizer's state, written beside the old one and renamed."""
    state = torch.zeros(megabytes * 250_000)
    with open("rank0_work.pt.new", "wb") as file:
        torch.save({"network": network.state_dict(), "state": state}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace("rank0_work.pt.new", "rank0_work.pt")


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("log", "evaluate", "save"), default="log")
    args = parser.parse_args()
    with job.started(args) as clock, open(os.devnull if dist.get_rank() else "rank0_work.jsonl", "w") as file:
        network = job.network(256)
        model = DDP(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, 256), torch.arange(8)
        step = 0
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0 and not args.mended:
                if args.kind == "log":
                    log(network, ROUNDS[args.size], file)
                elif args.kind == "evaluate" and step % 10 == 0:
                    evaluate(network, BATCHES[args.size])
                elif args.kind == "save" and step % 10 == 0:
                    save(network, MEGABYTES[args.size])
            clock.step()


if __name__ == "__main__":
    main()
