"""Training waits for batches: the loader decodes pictures, parses JSON or reads a slow disk, without workers.

torchrun --nproc-per-node 2 data_loader.py --kind jpeg
torchrun --nproc-per-node 2 data_loader.py --kind json --on 1       # rank 1's shard is JSON, rank 0's is not
torchrun --nproc-per-node 2 data_loader.py --kind disk --data /mnt  # where a slow disk is mounted

Mended: `DataLoader(num_workers=2, persistent_workers=True)`; for the slow disk, which workers make no faster, the files
stay in memory.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import job
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

COUNT = 256  # samples
WIDTH = 48 * 48 * 3
BATCH = 4
SIDE = {"small": 400, "large": 600}  # pixels of a JPEG
RECORDS = {"small": 300, "large": 550}  # in a JSON file
BYTES = {"small": 36 * 1024, "large": 48 * 1024}  # of a sample: 4 MB/s carry one for each rank in 18 and 25 ms


def make_pictures(folder: Path, side: int) -> None:
    """JPEG files of something smoother than noise."""
    from PIL import Image

    source = torch.Generator().manual_seed(0)
    for number in range(COUNT):
        rough = torch.randint(0, 256, (1, 3, side // 8, side // 8), generator=source).float()
        smooth = nn.functional.interpolate(rough, size=(side, side), mode="bilinear")[0].permute(1, 2, 0)
        Image.fromarray(smooth.byte().numpy()).save(folder / f"{number}.jpg", quality=90)


def make_records(folder: Path, records: int) -> None:
    """JSON files, each with so many records of 16 numbers."""
    source = torch.Generator().manual_seed(0)
    for number in range(COUNT):
        rows = torch.randn(records, 16, generator=source).tolist()
        text = json.dumps([{"id": place, "name": f"record {place}", "values": row} for place, row in enumerate(rows)])
        (folder / f"{number}.json").write_text(text, encoding="utf-8")


def make_bytes(folder: Path, size: int) -> None:
    """Files of random bytes."""
    for number in range(COUNT):
        with (folder / f"{number}.raw").open("wb") as file:
            file.write(os.urandom(size))
            file.flush()
            os.fsync(file.fileno())  # what is not on the disk yet cannot leave the memory


class Pictures(Dataset[tuple[Tensor, int]]):
    """Decodes and shrinks a JPEG for each sample."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        from PIL import Image

        picture = Image.open(io.BytesIO((self.folder / f"{number}.jpg").read_bytes())).convert("RGB")
        small = bytearray(picture.resize((48, 48)).tobytes())
        return torch.frombuffer(small, dtype=torch.uint8).float() / 255, number % 10


class Records(Pictures):
    """Parses a JSON file for each sample."""

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        rows = json.loads((self.folder / f"{number}.json").read_text(encoding="utf-8"))
        values = torch.tensor([row["values"] for row in rows[:400]]).flatten()
        return nn.functional.pad(values, (0, WIDTH - len(values))), number % 10


class Raw(Pictures):
    """Reads a file for each sample, from the disk: a data set larger than the memory is in no cache."""

    in_memory = False

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        with (self.folder / f"{number}.raw").open("rb") as file:
            if not self.in_memory:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = bytearray(file.read())
        return torch.frombuffer(found, dtype=torch.uint8)[:WIDTH].float() / 255, number % 10


class Ready(Pictures):
    """Samples that are tensors already."""

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.full((WIDTH,), number / COUNT), number % 10


def data(kind: str, size: str, folder: Path) -> Dataset[Any]:
    """The data set, made at the first run."""
    if kind == "jpeg":
        return Pictures(job.once(folder / f"jpeg{SIDE[size]}", lambda at: make_pictures(at, SIDE[size])))
    if kind == "json":
        return Records(job.once(folder / f"json{RECORDS[size]}", lambda at: make_records(at, RECORDS[size])))
    return Raw(job.once(folder / f"raw{BYTES[size]}", lambda at: make_bytes(at, BYTES[size])))


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("jpeg", "json", "disk"), default="jpeg")
    parser.add_argument("--on", choices=("all", "1"), default="all", help="ranks with such data (all)")
    args = parser.parse_args()
    with job.started(args) as clock:
        dataset = data(args.kind, args.size, args.data)
        if args.on == "1" and dist.get_rank() == 0:
            dataset = Ready(args.data)
        sampler: DistributedSampler[Any] = DistributedSampler(dataset)
        Raw.in_memory = args.mended
        by_workers = args.mended and args.kind != "disk"
        workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True} if by_workers else {}
        loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True, **workers)
        model = DDP(job.network(WIDTH, width=32))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            epoch += 1
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                clock.step()


if __name__ == "__main__":
    main()
