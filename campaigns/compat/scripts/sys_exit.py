"""sys.exit in the middle of the script, after training."""

import argparse
import sys

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "Exit code 0 from the middle of the file; what stands below it is never reached, in tuning neither."


def train(steps: int) -> nn.Module:
    rank = dist.get_rank()
    torch.manual_seed(15)
    model = DDP(nn.Sequential(nn.Linear(30, 200), nn.SELU(), nn.Linear(200, 200), nn.SELU(), nn.Linear(200, 3)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    torch.manual_seed(150 + rank)
    for _ in range(steps):
        inputs = torch.randn(32, 30)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1))
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: {loss.item():.4f} after {steps} steps")
    return model.module


def evaluate(model: nn.Module) -> float:
    inputs = torch.randn(512, 30, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return (model(inputs).argmax(1) == inputs[:, :3].argmax(1)).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--evaluate", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = train(args.steps)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "trained.pt")
    leave(model)
    if not args.evaluate:
        print("trained; give --evaluate to judge it")
        sys.exit(0)
    print(f"accuracy {evaluate(model):.3f}")


main()
raise SystemExit("only reached with --evaluate")
