"""Uneven inputs under join(): rank 1 has more batches in each epoch than rank 0."""

from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    rank = start()
    model = DDP(network())
    sgd = optimizer(model)
    for epoch in range(3):
        with model.join():
            for inputs, targets in batches(20 + 5 * rank, rank, seed=epoch):
                sgd.zero_grad()
                loss(model(inputs), targets).backward()
                sgd.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
