"""One rank computes longer than the others, and all wait for it.

torchrun --nproc-per-node 2 straggler.py --kind work       # rank 1's model computes a spectrum that nobody needs
torchrun --nproc-per-node 2 straggler.py --kind neighbour  # another program is busy on rank 1's core
torchrun --nproc-per-node 2 straggler.py --kind memory     # rank 1 returns its memory to the system, and gets it anew

Mended: without the spectrum; without the neighbour; memory stays with rank 1 too. The last one has one size.
"""

from __future__ import annotations

import os
import subprocess
import sys

import job
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

SPECTRA = {"small": 12, "large": 30}  # of about a millisecond each
NICENESS = {"small": 4, "large": 0}  # of the neighbour, beside this process's own; 4 leaves it a third of the core
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10000))\n"


class WithSpectra(nn.Module):
    """The network, behind a spectrum of the inputs that is only looked at."""

    def __init__(self, network: nn.Module, spectra: int) -> None:
        super().__init__()
        self.network, self.spectra = network, spectra
        self.peak = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        """What the network gives."""
        with torch.no_grad():
            for _ in range(self.spectra):
                self.peak = float(torch.fft.fft(inputs.repeat(4, 1)).abs().max())
        found: Tensor = self.network(inputs)
        return found


class Convolutions(nn.Sequential):
    """A network that computes for real, with few parameters."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 32, 32)), nn.Conv2d(1, 24, 3, padding=1)]
        for _ in range(3):
            layers += [nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


def start_neighbour(core: int, niceness: int) -> None:
    """A program that never rests on this core; it ends with its parent."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    os.sched_setaffinity(process.pid, {core})
    os.setpriority(os.PRIO_PROCESS, process.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + niceness))


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("work", "neighbour", "memory"), default="work")
    args = parser.parse_args()
    with job.started(args) as clock:
        slow = dist.get_rank() == 1 and not args.mended
        if args.kind == "work":
            network: nn.Module = WithSpectra(job.network(1024), SPECTRA[args.size] if slow else 0)
        else:
            network = Convolutions()
            cores = sorted(os.sched_getaffinity(0))
            core = cores[dist.get_rank() % len(cores)]
            os.sched_setaffinity(0, {core})
            if slow and args.kind == "memory":
                job.set_malloc(keeps=False)
            elif slow:
                start_neighbour(core, NICENESS[args.size])
        model = DDP(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, targets = torch.randn(16, 1024), torch.arange(16) % 10
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            clock.step()


if __name__ == "__main__":
    main()
