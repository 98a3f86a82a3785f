"""FSDP2 (fully_shard)."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

MODULES = ()
EXPECTED = "as written: the script built no DistributedDataParallel model"
NOTE = "Parameters are sharded, there is no DDP object to tune: FSDP is left alone."


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(17)
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(170 + rank)
    for step in range(80):
        inputs = torch.randn(32, 64)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :8].argmax(1))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"{step + 1} {loss.item():.4f}")
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    dist.broadcast_object_list(whole := [state], src=0)  # only rank 0 gets a full state
    if rank == 0:
        torch.save(state, "full.pt")
    plain = network()
    plain.load_state_dict(whole[0])
    leave(plain)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
