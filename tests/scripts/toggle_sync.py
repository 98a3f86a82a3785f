"""Accumulates as nanoGPT does: by assigning require_backward_grad_sync, with all forwards in the same place."""

from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = 4


def main() -> None:
    rank = start()
    model = DDP(network())
    sgd = optimizer(model)
    data = batches(120 * ACCUMULATE, rank)
    inputs, targets = next(data)
    for _ in range(120):
        for micro_batch in range(ACCUMULATE):
            model.require_backward_grad_sync = micro_batch == ACCUMULATE - 1
            error = loss(model(inputs), targets) / ACCUMULATE
            inputs, targets = next(data, (inputs, targets))  # fetched while the forward runs, as on a GPU
            error.backward()
        sgd.step()
        sgd.zero_grad(set_to_none=True)
    finish(model)


if __name__ == "__main__":
    main()
    stop()
