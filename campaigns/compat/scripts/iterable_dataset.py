"""IterableDataset that each rank reads its own part of."""

from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

MODULES = ()
EXPECTED = "tuned"
NOTE = "The stream has no length; while it is tuned the script may read further than the job does."


class Stream(IterableDataset):
    """Every (ranks x workers)-th sample of an endless series, as a reader of shards does."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        source = torch.Generator().manual_seed(14)
        number = 0
        while True:
            sample = torch.randn(32, generator=source)
            if number % (self.world * workers) == self.rank * workers + worker:
                yield sample, sample.cumsum(0)
            number += 1


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    model = DDP(nn.Sequential(nn.Linear(32, 384), nn.Tanh(), nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, 32)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(Stream(rank, world), batch_size=16, num_workers=1)
    for step, (inputs, targets) in enumerate(islice(loader, 160)):
        loss = nn.functional.smooth_l1_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 40 == 39:
            print(f"{step + 1} {loss.item():.5f}")
            with open("log.txt", "a") as log:
                log.write(f"{step + 1} {loss.item():.5f}\n")
            torch.save(model.module.state_dict(), "stream.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
