"""Single numbers travel in each step, only to be logged.

    torchrun --nproc-per-node 2 scalar_collectives.py --kind several   # hits, count, norm, nine losses, each by itself
    torchrun --nproc-per-node 4 scalar_collectives.py --kind loss      # the loss alone, though every tenth is logged

Mended: one call for all these numbers; the loss is added up on each rank and sent in every tenth step. --size changes
nothing.
"""

from __future__ import annotations

import job
import torch
import torch.distributed as dist
from torch import Tensor, nn

LOGGED = 10  # steps from one line of the log to the next


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of a number, or of several."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("several", "loss"), default="several")
    args = parser.parse_args()
    with job.started(args) as clock:
        network = job.network(64, milliseconds=3, width=32)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, 64), torch.arange(8)
        total, step = torch.zeros(()), 0
        while True:
            optimizer.zero_grad()
            scores = network(inputs)
            loss = nn.functional.cross_entropy(scores, targets)
            loss.backward()
            if args.kind == "several":
                norm = job.average_gradients(network).norm()
            optimizer.step()
            step += 1
            if args.kind == "several":
                hits, count = (scores.argmax(1) == targets).sum().float(), torch.tensor(float(len(targets)))
                of_classes = nn.functional.cross_entropy(scores.detach(), targets, reduction="none").unbind()
                numbers = [loss.detach(), hits, count, norm, *of_classes]
                if args.mended:
                    mean_over_ranks(torch.stack(numbers)).tolist()
                else:
                    for number in numbers:
                        float(mean_over_ranks(number))
            elif args.mended:
                total += loss.detach()
                if step % LOGGED == 0:
                    float(mean_over_ranks(total / LOGGED))
                    total.zero_()
            else:
                float(mean_over_ranks(loss))
            clock.step()


if __name__ == "__main__":
    main()
