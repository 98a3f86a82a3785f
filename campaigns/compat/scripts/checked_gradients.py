"""A script that checks its gradients in every step."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = (
    "To see what could be won, some steps are measured without DDP's reduction; a check of what the reduction does "
    "(here a hook's clamping) fails in them. Then that stays unknown, and trials find out what gains."
)


def clipped_mean(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of gradients that each rank has clamped before they travel."""
    buffer = bucket.buffer().clamp_(-0.1, 0.1).div_(group.size())
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(30)
    model = DDP(nn.Sequential(nn.Linear(36, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 9)))
    model.register_comm_hook(dist.group.WORLD, clipped_mean)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(300 + rank)
    for step in range(150):
        inputs = torch.randn(32, 36)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :9].argmax(1))
        loss.backward()
        assert all(parameter.grad.abs().max() <= 0.1 for parameter in model.parameters())
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"{step + 1} {loss.item():.4f}")
            torch.save(model.module.state_dict(), "checked.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
