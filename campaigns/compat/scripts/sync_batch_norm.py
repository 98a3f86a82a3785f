"""SyncBatchNorm; on CPU, which has none, the same by all-reduces in the forward pass."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = (
    "On CPU torch refuses the layer (`SyncBatchNorm layers only work with GPU modules`), so there the script shares "
    "the statistics itself: collectives of the model run between those of DDP, forward and backward."
)


class SharedBatchNorm(nn.BatchNorm2d):
    """Normalizes by the statistics of all ranks' batches; gradients flow back through the all-reduce."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(images)
        sums = torch.stack([images.mean((0, 2, 3)), images.square().mean((0, 2, 3))])
        mean, square = all_reduce(sums) / dist.get_world_size()
        var = square - mean.square()
        self.running_mean.lerp_(mean.detach(), 0.1)
        self.running_var.lerp_(var.detach(), 0.1)
        scale = self.weight * torch.rsqrt(var + self.eps)
        return images * scale.view(-1, 1, 1) + (self.bias - mean * scale).view(-1, 1, 1)


def block(into: int, out: int, norm: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(into, out, 3, stride=2, padding=1, bias=False), norm(out), nn.ReLU())


def main() -> None:
    dist.init_process_group("gloo")
    rank, on_gpu = dist.get_rank(), torch.cuda.is_available()
    torch.manual_seed(0)
    norm = nn.BatchNorm2d if on_gpu else SharedBatchNorm
    blocks = [block(3, 16, norm), block(16, 32, norm), block(32, 64, norm)]
    net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    net = (nn.SyncBatchNorm.convert_sync_batchnorm(net) if on_gpu else net).to(device)
    model = DDP(net, device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    torch.manual_seed(rank + 1)
    for epoch in range(3):
        model.train()
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
