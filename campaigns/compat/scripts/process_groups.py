"""Extra process groups for metrics and for the data."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "Collectives of other groups run between DDP's own, asynchronous ones too; they are left as they are."


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    metrics = dist.new_group(backend="gloo")
    alone = [dist.new_group([one]) for one in range(world)][rank]
    torch.manual_seed(13)
    model = DDP(nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(130 + rank)
    history = []
    for step in range(150):
        inputs = torch.randn(48, 40)
        labels = inputs[:, :4].argmax(1)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, labels)
        counts = torch.stack([loss.detach(), (outputs.argmax(1) == labels).float().mean(), torch.ones(())])
        work = dist.all_reduce(counts, group=metrics, async_op=True)
        loss.backward()
        optimizer.step()
        work.wait()
        dist.all_reduce(torch.ones(1), group=alone)
        history.append((counts[:2] / counts[2]).tolist())
        if step % 50 == 49:
            everyone = [None] * world
            dist.all_gather_object(everyone, (rank, history[-1]), group=metrics)
            if rank == 0:
                print(step + 1, everyone)
                with open("metrics.csv", "w") as file:
                    file.writelines(f"{loss},{accuracy}\n" for loss, accuracy in history)
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
