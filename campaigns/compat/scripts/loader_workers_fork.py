"""DataLoader workers by fork."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

MODULES = ()
EXPECTED = "tuned"
NOTE = "Workers begin with the state of their rank."


class Digits(Dataset):
    """Images of stripes, made in the workers."""

    def __len__(self) -> int:
        return 1920

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 10
        image = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(index))
        image[:, label : label + 6] += 1.0
        return image, label


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    model = DDP(
        nn.Sequential(nn.Flatten(), nn.Linear(256, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(Digits(), shuffle=True, seed=11)
    loader = DataLoader(
        Digits(), batch_size=16, sampler=sampler, num_workers=1, multiprocessing_context="fork", prefetch_factor=4
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, "checkpoint.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
