"""channels_last memory format."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "Parameters, and so gradients, have other strides than their shapes suggest; a configuration keeps them."


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(48, 10),
    )  # fmt: skip


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DDP(network().to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(70 + rank)
    for epoch in range(3):
        for _ in range(30):
            labels = torch.randint(10, (8,))
            images = (torch.randn(8, 3, 24, 24) + labels.view(-1, 1, 1, 1) / 5).to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        weight = model.module[0].weight
        assert weight.is_contiguous(memory_format=torch.channels_last)
        if rank == 0:
            print(
                f"epoch {epoch}: {loss.item():.4f}; strides {weight.stride()}, of its gradient {weight.grad.stride()}"
            )
            torch.save(model.module.state_dict(), "channels_last.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
