"""A training script with far too small buckets: larger ones are surely faster, so tuning has a gain to find."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "scripts"))

from common import CLASSES, FEATURES, batches, loss, start, stop
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH, LAYERS = 64, 24


def main() -> None:
    rank = start()
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    network = nn.Sequential(nn.Linear(FEATURES, WIDTH), *layers, nn.Linear(WIDTH, CLASSES))
    model = DDP(network, bucket_cap_mb=0.001)
    sgd = optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in batches(3000, rank):
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()


if __name__ == "__main__":
    main()
    stop()
