"""The model registers large buffers, and DDP broadcasts them before every forward pass.

    torchrun --nproc-per-node 2 buffer_broadcast.py

Mended: `DDP(model, broadcast_buffers=False)`. All ranks compute the same buffers, so nothing is lost.
"""

from __future__ import annotations

import job
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

TABLES = {"small": 6, "large": 12}  # of 1 MB


class Remembering(nn.Module):
    """Keeps positions and masks as buffers, as transformers do."""

    def __init__(self, network: nn.Module, tables: int) -> None:
        super().__init__()
        self.network = network
        for number in range(tables):
            self.register_buffer(f"table{number}", torch.full((500, 500), float(number)))

    def forward(self, inputs: Tensor) -> Tensor:
        """What the network gives."""
        found: Tensor = self.network(inputs + self.get_buffer("table0")[0, 0])
        return found


def main() -> None:
    """Train."""
    args = job.options(__doc__)
    with job.started(args) as clock:
        model = DDP(Remembering(job.network(256), TABLES[args.size]), broadcast_buffers=not args.mended)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, 256), torch.arange(8)
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            clock.step()


if __name__ == "__main__":
    main()
