"""A training script in which a signal sets off a fault: SIGUSR1 the one that FAULT names, in the step that follows.

In the real job nothing is set off. The parameters of each rank are left in OUT.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import torch
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP

set_off: list[str] = []


def note(*_: object) -> None:
    set_off.append(os.environ.get("FAULT", ""))


def fault() -> float:
    """Do what was set off; the factor of the loss."""
    kind = set_off.pop() if set_off else ""
    if kind == "exception":
        raise RuntimeError("planted: this rank cannot go on")
    if kind == "abort":
        os.abort()
    if kind == "memory":
        kept = []
        while True:  # until the kernel ends it
            kept.append(bytearray(os.urandom(1 << 20) * 16))
    if kind == "stuck":
        while True:
            time.sleep(60)
    return float("nan") if kind == "nan" else 1.0


def main() -> None:
    signal.signal(signal.SIGUSR1, note)
    rank = start()
    fault()
    model = DDP(network())
    sgd = optimizer(model)
    for inputs, targets in batches(120, rank):
        factor = fault()
        sgd.zero_grad()
        (loss(model(inputs), targets) * torch.tensor(factor)).backward()
        sgd.step()
        if "AUTODDP_TUNING" in os.environ:
            time.sleep(0.004)  # long enough for a fault to meet each moment
    finish(model)


if __name__ == "__main__":
    main()
    stop()
