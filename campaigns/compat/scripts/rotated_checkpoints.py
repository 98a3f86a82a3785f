"""Checkpoints rotated by hand, a symlink to the latest, and resuming."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EARLIER = True
EXPECTED = "tuned"
NOTE = "The script removes a checkpoint before it writes the next; the job resumes from yours, never from tuning's."
KEEP, EVERY = 2, 20
SAVED = Path("checkpoints")


def save(state: dict, step: int) -> None:
    """Remove first, then write: a full disk is the user's usual reason for this order."""
    for old in sorted(SAVED.glob("step*.pt"))[: 1 - KEEP or None]:
        os.remove(old)
    torch.save(state, SAVED / f"step{step:05}.pt")
    if (SAVED / "latest").is_symlink():
        (SAVED / "latest").unlink()
    (SAVED / "latest").symlink_to(f"step{step:05}.pt")


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(19)
    net = nn.Sequential(nn.Linear(50, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 5))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    first = 0
    if (SAVED / "latest").exists():
        state = torch.load(SAVED / "latest")
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    print(f"rank {rank} begins at step {first}")
    SAVED.mkdir(exist_ok=True)
    dist.barrier()
    model = DDP(net)
    last = 60 if "COMPAT_EARLIER" in os.environ else 220
    for step in range(first + 1, last + 1):
        data = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(32, 50, generator=data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :5].argmax(1))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % EVERY == 0:
            save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, step)
    leave(net)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
