"""Only 30 steps: fewer than any study needs."""

from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    rank = start()
    model = DDP(network())
    sgd = optimizer(model)
    for inputs, targets in batches(30, rank):
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
