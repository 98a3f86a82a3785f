"""A script without DDP that averages its gradients itself."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

MODULES = ()
EXPECTED = "as written: the script built no DistributedDataParallel model"
NOTE = "Without DistributedDataParallel there is nothing to tune; the whole script is run once before that is known."


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(18 + rank)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    same = parameters_to_vector(model.parameters()).detach()
    dist.broadcast(same, src=0)
    vector_to_parameters(same, model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(150):
        inputs = torch.randn(32, 16)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
        loss.backward()
        average_gradients(model)
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"{step + 1} {loss.item():.4f}")
            torch.save(model.state_dict(), "averaged.pt")
    leave(model)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
