"""find_unused_parameters=True with branches that are not used."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = (
    "One expert is used in a step, another one on each rank, and one never: the argument stays as the script gives it."
)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(32, 128)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)) for _ in range(4)
        )
        self.head = nn.Linear(128, 6)

    def forward(self, inputs: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.head(self.experts[chosen](torch.relu(self.trunk(inputs))))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(20)
    model = DDP(Experts(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(200 + rank)
    for step in range(150):
        inputs = torch.randn(32, 32)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(inputs, (step + rank) % 3), inputs[:, :6].argmax(1))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            assert model.module.experts[3][0].weight.grad is None
            print(f"{step + 1} {loss.item():.4f}")
            torch.save(model.module.state_dict(), "experts.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
