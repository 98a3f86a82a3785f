"""Batches from prefetching threads."""

import queue
import threading

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "Threads of the script run on while autoddp measures; they are neither stopped nor counted."


class Prefetcher:
    """Two threads that prepare batches ahead; batches come in order all the same."""

    def __init__(self, rank: int, batches: int) -> None:
        self.rank, self.batches = rank, batches
        self.queues = [queue.Queue(maxsize=4) for _ in range(2)]
        for number in range(2):
            threading.Thread(target=self._fill, args=(number,), name=f"prefetch-{number}", daemon=True).start()

    def _fill(self, number: int) -> None:
        for batch in range(number, self.batches, 2):
            source = torch.Generator().manual_seed(1000 * batch + self.rank)
            self.queues[number].put(torch.randn(32, 3, 16, 16, generator=source))
        self.queues[number].put(None)

    def __iter__(self):
        number = 0
        while (images := self.queues[number % 2].get()) is not None:
            yield images
            number += 1


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(25)
    model = DDP(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=2), nn.Tanh()))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step, images in enumerate(Prefetcher(rank, 150)):
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(images), images.tanh())
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"{step + 1} {loss.item():.4f}")
            torch.save(model.module.state_dict(), "autoencoder.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
