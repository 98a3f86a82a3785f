"""Two DDP models in one loss, one optimizer for both."""

from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    rank = start()
    wide, narrow = DDP(network(64)), DDP(network(16))
    sgd = optimizer(wide, narrow)
    for inputs, targets in batches(120, rank):
        sgd.zero_grad()
        loss(wide(inputs) + narrow(inputs), targets).backward()
        sgd.step()
    finish(wide, narrow)


if __name__ == "__main__":
    main()
    stop()
