"""Jobs without DDP that communicate as they should: no finding is right.

    torchrun --nproc-per-node 2 clean_collectives.py --kind zero      # gradients and weights in pieces, by one call
    torchrun --nproc-per-node 4 clean_collectives.py --kind muon      # each rank orthogonalizes some of the matrices
    torchrun --nproc-per-node 4 clean_collectives.py --kind pipeline  # activations go from rank to rank
    torchrun --nproc-per-node 4 clean_collectives.py --kind ring      # pieces go around, in batches of sends
    torchrun --nproc-per-node 2 clean_collectives.py --kind local     # weights are averaged in every 20th step
    torchrun --nproc-per-node 4 clean_collectives.py --kind metrics   # measurements are gathered in every 50th step
    torchrun --nproc-per-node 2 clean_collectives.py --kind overlap   # a call runs while the next gradient is computed
    torchrun --nproc-per-node 2 clean_collectives.py --kind tensor    # a layer lies on two ranks, which add up
    torchrun --nproc-per-node 4 clean_collectives.py --kind grid      # a group for the data, another for the layers
    torchrun --nproc-per-node 2 clean_collectives.py --kind epochs    # a barrier, and objects, once in 100 steps

Computing is sleeping, but for the smallest of networks. --size and --mended change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import job
import torch
import torch.distributed as dist
from torch import Tensor, nn

Step = Callable[[int], None]
"""One step of a job, given its number."""
COMPUTING = 0.025  # seconds of a step


class Trainer:
    """A small network with an optimizer; each kind of job exchanges something else."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.network = job.network(64, milliseconds=COMPUTING * 1e3, width=64)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3)
        self.inputs, self.targets = torch.randn(8, 64), torch.arange(8)

    def compute(self) -> Tensor:
        """The loss of a batch, with gradients."""
        self.optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(self.network(self.inputs), self.targets)
        loss.backward()
        return loss.detach()

    def zero(self) -> Step:
        """Each rank updates a part of the weights."""
        numbers = sum(parameter.numel() for parameter in self.network.parameters()) // self.world * self.world
        weights = nn.utils.parameters_to_vector(self.network.parameters()).detach()[:numbers].clone()
        mine = torch.empty(numbers // self.world)

        def step(_: int) -> None:
            self.compute()
            gradient = nn.utils.parameters_to_vector(p.grad for p in self.network.parameters() if p.grad is not None)
            dist.reduce_scatter_tensor(mine, gradient[:numbers])
            own = weights.chunk(self.world)[self.rank] - 1e-3 * mine / self.world
            dist.all_gather_into_tensor(weights, own)
            self.optimizer.step()

        return step

    def muon(self) -> Step:
        """Matrices are shared out among the ranks, and their updates gathered."""
        numbers = sum(parameter.numel() for parameter in self.network.parameters())

        def step(_: int) -> None:
            self.compute()
            job.average_gradients(self.network)
            matrices = [p.grad for p in self.network.parameters() if p.grad is not None and p.dim() == 2]
            update = torch.zeros(-(-numbers // self.world))
            for matrix in matrices[self.rank :: self.world]:
                turned = matrix / (matrix.norm() + 1e-7)
                for _ in range(3):
                    turned = 1.5 * turned - 0.5 * turned @ turned.T @ turned
                update[: turned.numel()] += turned.reshape(-1)
            everyone = torch.empty(self.world * update.numel())
            dist.all_gather_into_tensor(everyone, update)
            for matrix, turned in zip(matrices, everyone.chunk(self.world), strict=False):
                matrix.add_(turned[: matrix.numel()].view_as(matrix))
            self.optimizer.step()

        return step

    def pipeline(self) -> Step:
        """Two micro-batches on their way through the ranks."""

        def step(_: int) -> None:
            for _ in range(2):
                activations = torch.zeros(8, 4096)
                if self.rank > 0:
                    dist.recv(activations, self.rank - 1)
                time.sleep(COMPUTING / 2)
                if self.rank < self.world - 1:
                    dist.send(activations + 1, self.rank + 1)
            self.optimizer.step()

        return step

    def ring(self) -> Step:
        """Each rank computes with a piece, while the next one comes."""
        pieces = [torch.zeros(20_000), torch.zeros(20_000)]

        def step(_: int) -> None:
            to, whence = (self.rank + 1) % self.world, (self.rank - 1) % self.world
            for turn in range(self.world):
                here, coming = pieces[turn % 2], pieces[(turn + 1) % 2]
                both = [dist.P2POp(dist.isend, here, to), dist.P2POp(dist.irecv, coming, whence)]
                works = dist.batch_isend_irecv(both)
                time.sleep(COMPUTING / self.world)
                for work in works:
                    work.wait()
            self.optimizer.step()

        return step

    def local(self) -> Step:
        """Ranks train by themselves for 20 steps."""

        def step(number: int) -> None:
            self.compute()
            self.optimizer.step()
            if number % 20 == 0:
                weights = nn.utils.parameters_to_vector(self.network.parameters()).detach()
                dist.all_reduce(weights)
                nn.utils.vector_to_parameters(weights / self.world, self.network.parameters())

        return step

    def metrics(self) -> Step:
        """The gradients in each step, measurements now and then."""

        def step(number: int) -> None:
            loss = self.compute()
            job.average_gradients(self.network)
            self.optimizer.step()
            if number % 50 == 0:
                everyone = torch.empty(self.world)
                dist.all_gather_into_tensor(everyone, loss.reshape(1))
                dist.all_reduce(loss)

        return step

    def overlap(self) -> Step:
        """The first gradient travels while the second one is computed."""
        first, second = torch.ones(500_000), torch.ones(50_000)

        def step(_: int) -> None:
            time.sleep(COMPUTING)
            work = dist.all_reduce(first, async_op=True)
            time.sleep(COMPUTING)
            assert work is not None
            work.wait()
            dist.all_reduce(second)
            first.div_(self.world)
            second.div_(self.world)
            self.optimizer.step()

        return step

    def tensor(self) -> Step:
        """The sum of both halves of a layer is needed at once."""
        activations = torch.ones(400_000)

        def step(_: int) -> None:
            for _ in range(3):
                time.sleep(COMPUTING)
                dist.all_reduce(activations)
                activations.div_(self.world).relu_()  # the next layer reads it: a mean alone could be made later
            self.optimizer.step()

        return step

    def grid(self) -> Step:
        """Two layers of ranks, each of which has two ranks for the data."""
        rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        activations = torch.ones(100_000)

        def step(_: int) -> None:
            self.compute()
            dist.all_reduce(activations, group=rows[self.rank // 2])
            activations.clamp_(0, 1)
            time.sleep(COMPUTING)
            job.average_gradients(self.network, columns[self.rank % 2])
            self.optimizer.step()

        return step

    def epochs(self) -> Step:
        """The end of an epoch costs something, and comes seldom."""

        def step(number: int) -> None:
            loss = self.compute()
            job.average_gradients(self.network)
            self.optimizer.step()
            if number % 100 == 0:
                found: list[Any] = [None] * self.world
                dist.all_gather_object(found, {"loss": float(loss)})
                dist.barrier()

        return step


KINDS = ("zero", "muon", "pipeline", "ring", "local", "metrics", "overlap", "tensor", "grid", "epochs")


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    args = parser.parse_args()
    with job.started(args) as clock:
        step: Step = getattr(Trainer(), args.kind)()
        number = 0
        while True:
            step(number)
            number += 1
            clock.step()


if __name__ == "__main__":
    main()
