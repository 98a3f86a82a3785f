"""Gives DDP its arguments by position: module, device_ids, output_device, dim, broadcast_buffers."""

from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    rank = start()
    model = DDP(network(), None, None, 0, False, bucket_cap_mb=1)
    assert not model.broadcast_buffers
    sgd = optimizer(model)
    for inputs, targets in batches(120, rank):
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
    assert not model.broadcast_buffers
    finish(model)


if __name__ == "__main__":
    main()
    stop()
