"""What the jobs of this folder share: options, a network that computes for a given time, the times of the steps.

    args = job.options(__doc__)
    with job.started(args) as clock:
        for batch in loader:
            ...
            clock.step()

Each job is slow for the reason that its file is named after. `--size` says how slow, and `--mended` runs it with the
edit that takes the reason away, and with nothing else changed. `--turns` does so in a part of the steps, for jobs that
look at `args.mended` in each step. The job knows nothing of any launcher.

The cores of a test machine are few, so much of the computing sleeps: what is real is the reason for being slow.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SHARED = Path(tempfile.gettempdir(), "autoddp-slow-jobs")
"""Where jobs keep the files that they read."""


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_LARGE_TENSOR, _SMALL_TENSOR = 2**25, 2**17  # bytes


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of every job; the caller may add its own."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--steps", type=int, default=100)
    found.add_argument("--size", choices=("small", "large"), default="large", help="how slow it is (large)")
    found.add_argument("--mended", action="store_true", help="without the reason for being slow")
    found.add_argument("--turns", type=int, metavar="N", help="N steps as written and N mended, in turn")
    found.add_argument("--data", type=Path, default=SHARED, metavar="FOLDER", help="the job's files are made here")
    found.add_argument("--times", metavar="FILE", help="rank 0 writes the seconds of every rank's steps here")
    return found


def options(doc: str | None) -> argparse.Namespace:
    """The options of a job that has none of its own."""
    return parser(doc).parse_args()


def set_malloc(keeps: bool) -> None:
    """Whether glibc keeps what a step frees for the next one, or returns every tensor's memory to the system.

    By its own rules it does a part of each, which differs by chance from one rank to the other: then ranks that do the
    same differ by a fifth of a step.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_THRESHOLD, _LARGE_TENSOR if keeps else _SMALL_TENSOR)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1 if keeps else _SMALL_TENSOR)


class _AllSteps(Exception):
    """The job has done its steps."""


class Clock:
    """Seconds from the end of a step to the end of the next one: all that the script does in between counts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._last = time.perf_counter()
        self.seconds: list[float] = []

    def step(self) -> None:
        """Call it at the end of each step; the job ends with the last one."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        if len(self.seconds) >= self._args.steps:
            raise _AllSteps
        if self._args.turns:
            self._args.mended = len(self.seconds) // self._args.turns % 2 == 1


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[Clock]:
    """A process group and a clock; at the end the times are written and the process ends."""
    set_malloc(keeps=True)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    clock = Clock(args)
    with contextlib.suppress(_AllSteps):
        yield clock
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, clock.seconds)
    if args.times and dist.get_rank() == 0:
        Path(args.times).write_text(json.dumps(everyone), encoding="utf-8")
    dist.barrier()
    # Not through the interpreter's own end: a thread of torch 2.13's gloo that waits for the GIL may abort there.
    os._exit(0)


def average_gradients(network: nn.Module, group: dist.ProcessGroup | None = None) -> Tensor:
    """Make every gradient its mean over the ranks by one call, and give all of them in one tensor."""
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, piece in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(piece.view_as(gradient))
    return flat


def device() -> torch.device:
    """The GPU of this rank, which ranks share where there are fewer; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was given, so that the clock counts it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once(folder: Path, make: Any) -> Path:
    """`folder`, filled by `make(folder)` unless an earlier run has done it. Rank 0 makes it while the others wait."""
    if dist.get_rank() == 0 and not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        half = Path(tempfile.mkdtemp(dir=folder.parent))
        make(half)
        half.rename(folder)
    dist.barrier()
    return folder


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Computing(nn.Module):
    """Stands for a layer that computes for so many seconds in its two passes, without taking a core."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.times = (forward, backward)

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs as they are."""
        found: Tensor = _Sleep.apply(inputs, *self.times)  # type: ignore[no-untyped-call]
        return found


def set_computing(network: nn.Module, milliseconds: float) -> None:
    """Let the layers of `network` that stand for computing take these milliseconds in all."""
    layers = [one for one in network.modules() if isinstance(one, Computing)]
    for one in layers:
        one.times = _times(milliseconds, len(layers))


def _times(milliseconds: float, layers: int) -> tuple[float, float]:
    """Seconds of each layer's two passes."""
    each = milliseconds / 1e3 / layers / 3
    return each, 2 * each


def network(inputs: int, milliseconds: float = 40.0, width: int = 128, depth: int = 4) -> nn.Module:
    """`depth` layers whose passes take these milliseconds in all, two thirds of them in the backward pass."""
    layers: list[nn.Module] = [nn.Linear(inputs, width)]
    for _ in range(depth):
        layers += [nn.ReLU(), nn.Linear(width, width), Computing(*_times(milliseconds, depth))]
    return nn.Sequential(*layers, nn.Linear(width, 10))
