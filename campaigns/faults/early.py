"""A training script with an exception planted at an early place in one rank: FAIL_RANK and FAIL_AT say where.

FAIL_AT is "import", "start", "model" or the number of a step. With FAIL_IN=tuning the real job has no fault; its ranks
leave their parameters in OUT.
"""

import os
import sys
from pathlib import Path

HERE = os.environ["FAIL_RANK"] == os.environ["RANK"]
TUNING = "AUTODDP_TUNING" in os.environ


def fault(place: str) -> None:
    if HERE and place == os.environ["FAIL_AT"] and (TUNING or os.environ["FAIL_IN"] != "tuning"):
        raise RuntimeError(f"planted: {place}")


fault("import")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "scripts"))

from common import batches, finish, loss, network, optimizer, start, stop  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402


def main() -> None:
    rank = start()
    fault("start")
    model = DDP(network())
    fault("model")
    sgd = optimizer(model)
    for step, (inputs, targets) in enumerate(batches(30, rank)):
        fault(str(step))
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
