"""Fashion-MNIST with one of two small convolutional networks: plain DDP.

    torchrun --nproc-per-node 2 recipes/fashion_mnist/train.py --net conv2 --data ~/data/fashion-mnist

Without --data the images are generated: the same shape, number and type, but not clothes. With --data the folder holds
the four idx files of the data set (train-images-idx3-ubyte and so on), gzipped or not.
"""

import argparse
import gzip
import math
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Images = tuple[Tensor, Tensor]
"""Images (N x 1 x 28 x 28, uint8) and their labels (N, int64, 0 to 9)."""


def parse_args() -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=sorted(NETWORKS), default="conv2", help="the network (default: conv2)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the idx files (default: generated images)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step (default: 64)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the training images (default: 1)")
    parser.add_argument("--steps", type=int, default=math.inf, help="stop after so many steps (default: no limit)")
    parser.add_argument("--lr", type=float, default=0.02, help="SGD's learning rate (default: 0.02)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the shuffling (default: 0)")
    return parser.parse_args()


# ------------------------------------------------------------------ networks


def conv2() -> nn.Module:
    """Two convolutions and two linear layers: 431,080 parameters, 93 % of them in one matrix."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * 4 * 4, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


def conv1() -> nn.Module:
    """One convolution and one linear layer: 29,330 parameters, so latency is all that communication costs."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(20 * 12 * 12, 10),
    )


NETWORKS = {"conv1": conv1, "conv2": conv2}

# ---------------------------------------------------------------------- data


class DataError(ValueError):
    """A data file that cannot be used; the message is one line and names the file."""


def read_bytes(path: Path) -> bytes:
    """The content of `path`, or of `path`.gz if only that exists."""
    zipped = path.with_name(path.name + ".gz")
    found = path if path.exists() else zipped
    try:
        return gzip.decompress(found.read_bytes()) if found == zipped else found.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file, and no {zipped.name} beside it") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{found}: cannot be read: {error}") from None


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read one idx file of unsigned bytes: `read_idx(folder / "train-labels-idx1-ubyte", 1)`.

    The format: two zero bytes, a type (8: unsigned byte), the number of dimensions, each as a big-endian 32-bit
    number, then the values.
    """
    content = read_bytes(path)
    head = 4 + 4 * dimensions
    expected = bytes([0, 0, 8, dimensions])
    if content[:4] != expected:
        raise DataError(f"{path}: starts with {content[:4].hex() or 'nothing'}, not with {expected.hex()}: not the idx")
    if len(content) < head:
        raise DataError(f"{path}: ends after {len(content)} bytes, within its head of {head}")
    shape = [int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4)]
    if len(content) != head + math.prod(shape):
        size = "x".join(map(str, shape))
        raise DataError(f"{path}: holds {len(content) - head} values, but its head says {size} = {math.prod(shape)}")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape).copy()


def read_images(folder: Path, part: str) -> Images:
    """Read the images and labels of one part, "train" or "t10k", and check that they belong together."""
    path = folder / f"{part}-images-idx3-ubyte"
    images, labels = read_idx(path, 3), read_idx(folder / f"{part}-labels-idx1-ubyte", 1)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{path}: its images are {images.shape[1]}x{images.shape[2]} pixels, not 28x28")
    if len(images) != len(labels):
        raise DataError(f"{path}: holds {len(images)} images, but there are {len(labels)} labels")
    if len(labels) == 0 or labels.max() > 9:
        raise DataError(f"{folder}: the labels of {part} are not 0 to 9")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()


def generate_images(number: int, seed: int) -> Images:
    """Ten random patterns, one per class, under as much noise: learnable, and the same on every rank."""
    patterns = torch.randint(0, 128, (10, 1, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (number,), generator=generator)
    noise = torch.randint(0, 128, (number, 1, 28, 28), generator=generator, dtype=torch.uint8)
    return patterns[labels] + noise, labels


def load_data(folder: Path | None) -> tuple[Images, Images]:
    """The training and the test images: read from `folder`, or generated."""
    if folder is None:
        return generate_images(60_000, seed=1), generate_images(10_000, seed=2)
    return read_images(folder, "train"), read_images(folder, "t10k")


# ------------------------------------------------------------------ training


def as_input(images: Tensor, device: torch.device) -> Tensor:
    """Bytes to floats on the device: a fourth of the traffic of sending floats."""
    return images.to(device).float().div_(255)


@torch.no_grad()
def accuracy(network: nn.Module, data: Images, device: torch.device) -> float:
    """The share of images whose class is recognised."""
    images, labels = data
    right = 0
    for part, wanted in zip(images.split(1000), labels.split(1000), strict=True):
        right += int((network(as_input(part, device)).argmax(1).cpu() == wanted).sum())
    return right / len(labels)


def train(model: DDP, data: Images, args: argparse.Namespace, device: torch.device) -> None:
    """Run the epochs, at most --steps steps; rank 0 prints one line for each epoch."""
    images = TensorDataset(*data)
    sampler: DistributedSampler = DistributedSampler(images, seed=args.seed)
    # Batches of indices as the sampler: one indexing per batch, not one per image.
    loader = DataLoader(images, sampler=BatchSampler(sampler, args.batch_size, drop_last=False), batch_size=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    left = args.steps
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        started, seen, total, steps = time.perf_counter(), 0, torch.zeros((), device=device), 0
        for batch, labels in loader:
            if steps >= left:
                break
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(as_input(batch, device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
            seen, steps = seen + len(labels), steps + 1
        left -= steps
        if dist.get_rank() == 0 and steps:
            mean = total.item() / steps  # waits for the GPU, so the clock is read after it
            speed = seen * dist.get_world_size() / (time.perf_counter() - started)
            print(f"epoch {epoch + 1}/{args.epochs}  {steps} steps  loss {mean:.4f}  {speed:.0f} images/s", flush=True)


def main() -> None:
    """Load, train, then test on rank 0."""
    args = parse_args()
    try:
        training, test = load_data(args.data)
    except DataError as error:
        sys.exit(f"error: {error}")
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    if dist.get_rank() == 0:
        source = args.data or "generated images (give --data DIR for the real ones)"
        print(f"{args.net} on {len(training[0])} images: {source}", flush=True)
    torch.manual_seed(args.seed)
    network = NETWORKS[args.net]().to(device)
    # The DDP object must not outlive the process group: torch 2.13 on gloo may then hang while freeing it.
    train(DDP(network, device_ids=[device.index] if use_cuda else None), training, args, device)
    if dist.get_rank() == 0:
        print(f"test accuracy {100 * accuracy(network, test, device):.1f} %", flush=True)
    dist.barrier()  # nobody takes the process group down while others still compute: torch 2.13 may abort then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
