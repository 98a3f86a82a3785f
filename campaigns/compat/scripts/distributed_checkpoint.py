"""torch.distributed.checkpoint: every rank saves its part, and resuming."""

import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parameters import leave
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EARLIER = True
EXPECTED = "tuned"
NOTE = "All ranks write into one folder, by collectives of DCP; the folder is replaced as a whole."
FOLDER = "checkpoint"


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(26)
    model = DDP(nn.Sequential(nn.Linear(44, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 11)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if os.path.exists(os.path.join(FOLDER, ".metadata")):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.zeros((), dtype=torch.long)}
        dcp.load(state, checkpoint_id=FOLDER)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = int(state["step"])
    print(f"rank {rank} begins at step {first}")
    for step in range(first + 1, (50 if "COMPAT_EARLIER" in os.environ else 200) + 1):
        inputs = torch.randn(32, 44, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :11].argmax(1))
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save(
                {"model": weights, "optimizer": moments, "step": torch.tensor(step)}, checkpoint_id=FOLDER + ".new"
            )
            if rank == 0:
                shutil.rmtree(FOLDER, ignore_errors=True)
                os.rename(FOLDER + ".new", FOLDER)
            dist.barrier()
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
