"""Two optimizers and schedulers for one model."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MODULES = ()
EXPECTED = "tuned"
NOTE = "AdamW for the embedding, SGD for the rest, stepped one after the other."


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(800, 64)
        self.body = nn.GRU(64, 96, batch_first=True)
        self.tags = nn.Linear(96, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tags(self.body(self.words(tokens))[0])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DistributedDataParallel(Tagger())
    rest = [value for name, value in model.module.named_parameters() if not name.startswith("words")]
    optimizers = [
        torch.optim.AdamW(model.module.words.parameters(), lr=3e-3),
        torch.optim.SGD(rest, lr=0.1, momentum=0.9, nesterov=True),
    ]
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 120),
        torch.optim.lr_scheduler.StepLR(optimizers[1], 40, gamma=0.5),
    ]
    torch.manual_seed(40 + rank)
    for step in range(120):
        tokens = torch.randint(800, (16, 24))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 12)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        if rank == 0 and step % 30 == 29:
            state = {"model": model.module.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}
            torch.save(state, "tagger.pt")
            print(f"{step + 1} {loss.item():.4f}")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
