"""torch.compile: DDP around a compiled module."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "Compiled once for all trials; with --recompile autoddp also tries what compiles the model again."


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.outer(nn.functional.silu(self.inner(self.norm(inputs))))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(32, 128), Residual(128), Residual(128), nn.Linear(128, 6))
    model = DDP(torch.compile(net, backend="aot_eager"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(90 + rank)
    for step in range(150):
        inputs = torch.randn(64, 32, generator=data)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :6].argmax(1))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"{step + 1} {loss.item():.4f}")
            torch.save(net.state_dict(), "compiled.pt")
    leave(net)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
