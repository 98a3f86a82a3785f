"""A data loader that takes --ms for each batch on the ranks named by --slow; each epoch makes a new data set."""

import argparse
import time

import torch
from common import CLASSES, FEATURES, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 320

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.randn(FEATURES, generator=torch.Generator().manual_seed(place)), place % CLASSES


def step(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", default="0,1")
    parser.add_argument("--by-hand", action="store_true", help="change the parameters without an optimizer")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--ms", type=float, default=20.0, help="of each batch on a slow rank")
    args = parser.parse_args()
    rank = start()
    torch.set_num_threads(1)
    model = DDP(network())
    sgd = None if args.by_hand else optimizer(model)
    seconds = args.ms / 4000 if str(rank) in args.slow.split(",") else 0.0
    for _ in range(args.epochs):
        for inputs, targets in DataLoader(Numbers(seconds), batch_size=4):
            model.zero_grad()
            time.sleep(0.005)
            loss(model(inputs), targets).backward()
            if sgd is None:
                step(model)
            else:
                sgd.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
