"""hydra: an app with a working folder of its own for each run (hydra.job.chdir=True)."""

import logging
import os

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MODULES = ("hydra",)
EXPECTED = "tuned"
NOTE = "hydra names each run's folder by the time, so a tuning run never shares one with the real job."
WORDS = ("hydra.job.chdir=True", "+lr=0.05", "+steps=600")

log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    source = torch.Generator().manual_seed(rank)
    for step in range(1, config.steps + 1):
        inputs = torch.randn(16, 32, generator=source)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 40 == 0:
            log.info("step %d: loss %.4f", step, loss.item())
            torch.save({"step": step, "config": OmegaConf.to_container(config), "model": model.state_dict()}, "last.pt")
            with open("history.csv", "a") as file:
                file.write(f"{step},{os.getcwd()}\n")
    leave(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
