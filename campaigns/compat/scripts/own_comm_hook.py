"""A communication hook that the script registers."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "The script's hook is never replaced; only settings that leave a hook in place are tried."


def clipped_mean(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of gradients that each rank has clamped before they travel."""
    buffer = bucket.buffer().clamp_(-0.1, 0.1).div_(group.size())
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(22)
    model = DDP(nn.Sequential(nn.Linear(36, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 9)))
    model.register_comm_hook(dist.group.WORLD, clipped_mean)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(220 + rank)
    for step in range(150):
        inputs = torch.randn(32, 36)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :9].argmax(1))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"{step + 1} {loss.item():.4f}")
            torch.save(model.module.state_dict(), "clamped.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
