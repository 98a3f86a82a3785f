"""SyncBatchNorm, converted before DDP."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = (
    "On CPU torch refuses SyncBatchNorm in training mode (`expected input tensor to be on GPU or XPU`), so there the "
    "script freezes the running statistics, as for fine-tuning."
)


class Block(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, out, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(images)))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    )
    net = nn.Sequential(
        Block(3, 16), Block(16, 32), Block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)
    model = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    torch.manual_seed(rank + 1)
    for epoch in range(3):
        model.train()
        if device.type == "cpu":
            for module in model.modules():
                if isinstance(module, nn.SyncBatchNorm):
                    module.eval()
        for _ in range(40):
            labels = torch.randint(10, (16,), device=device)
            images = torch.randn(16, 3, 32, 32, device=device) + labels.view(-1, 1, 1, 1) / 10
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "model.pt")
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
