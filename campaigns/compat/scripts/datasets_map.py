"""datasets: load_dataset and map, whose cache rank 0 writes and the others read."""

import os

import torch
import torch.distributed as dist
from datasets import load_dataset
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

MODULES = ("datasets",)
EXPECTED = "tuned"
NOTE = "The cache that a tuning run fills vanishes with it, so the real job fills it once more."


def features(row: dict) -> dict:
    return {"inputs": [((row["number"] * (k + 3)) % 17) / 17 for k in range(16)], "target": row["number"] % 4}


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0 and not os.path.exists("table.csv"):
        with open("table.csv", "w") as file:
            file.write("number\n" + "".join(f"{number}\n" for number in range(1600)))
    dist.barrier()
    if rank != 0:
        dist.barrier()  # until the cache is there
    data = load_dataset("csv", data_files="table.csv", split="train").map(features)
    if rank == 0:
        dist.barrier()
        data.save_to_disk("mapped")
    data = data.with_format("torch", columns=["inputs", "target"])
    torch.manual_seed(7)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch["inputs"]), batch["target"]).backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "model.pt")
    leave(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
