"""A training script in which a signal sets off a fault: SIGUSR1 the one that FAULT names, in the step that follows.

"stuck in import" needs no signal: rank 1 comes no further than its imports. "illegal" needs none either: the script
refuses gradients that are views into DDP's buckets. In the real job nothing is set off. The parameters of
each rank are left in OUT.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

FAULT = os.environ.get("FAULT", "")
TUNING = "AUTODDP_TUNING" in os.environ
set_off: list[str] = []
signal.signal(signal.SIGUSR1, lambda *_: set_off.append(FAULT))  # before the imports, which take seconds
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "scripts"))

if FAULT == "stuck in import" and TUNING and os.environ["RANK"] == "1":
    import sleeping  # noqa: F401

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import batches, finish, loss, network, optimizer, start, stop  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


class NeverRead(Dataset[int]):
    """Data that its reader waits for in vain."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        while True:
            time.sleep(60)


def fault() -> float:
    """Do what was set off; the factor of the loss."""
    kind = set_off.pop() if set_off else ""
    if kind == "exception":
        raise RuntimeError("planted: this rank cannot go on")
    if kind == "abort":
        os.abort()
    if kind == "memory":
        kept = []
        while True:  # until there is no more
            kept.append(torch.ones(1 << 22))
    if kind == "stuck in a collective":
        dist.recv(torch.zeros(1), src=0)  # which rank 0 never sends
    if kind == "stuck in data loading":
        next(iter(DataLoader(NeverRead(), num_workers=1)))
    return float("nan") if kind == "nan" else 1.0


def main() -> None:
    # A rank of the real job whose peer is gone waits for that one's store as long as under torchrun: half an hour.
    rank = start(timeout=None if TUNING else timedelta(seconds=60))
    fault()
    model = DDP(network())
    sgd = optimizer(model)
    for inputs, targets in batches(120, rank):
        factor = fault()
        sgd.zero_grad()
        (loss(model(inputs), targets) * torch.tensor(factor)).backward()
        if FAULT == "illegal" and model.gradient_as_bucket_view:
            raise RuntimeError("planted: this model takes no gradients that lie in buckets")
        sgd.step()
        if TUNING:
            time.sleep(0.004)  # long enough for a fault to meet each moment
    finish(model)


if __name__ == "__main__":
    main()
    stop()
