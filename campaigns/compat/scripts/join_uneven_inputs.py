"""join() with uneven inputs."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

MODULES = ()
EXPECTED = "as written: inside join\\(\\) a rank has no more inputs"
NOTE = (
    "A rank at the end of its inputs makes no steps while the others go on, so tuning ends there; with an epoch longer "
    "than the tuning the script is tuned."
)


def samples(rank: int) -> TensorDataset:
    """Rank 1 has a quarter more than rank 0."""
    number = 1280 + 320 * rank
    source = torch.Generator().manual_seed(rank)
    inputs = torch.randn(number, 64, generator=source)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(samples(rank), batch_size=32)
    for epoch in range(4):
        seen = 0
        with model.join():
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                seen += 1
        print(f"epoch {epoch}: rank {rank} has seen {seen} batches, loss {loss.item():.5f}")
        if rank == 0:
            torch.save(model.state_dict(), "joined.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
