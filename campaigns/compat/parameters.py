"""What a script of this folder leaves at its end, so that two runs can be compared. Nothing of autoddp is imported.

from parameters import leave

leave(model)
"""

import os
import time
from pathlib import Path

import torch


def leave(module: torch.nn.Module, rank: int | None = None) -> None:
    """Save the parameters and buffers of `module` as `rank<r>.pt` in the folder COMPAT_OUT, if there is one.

    `rank`: for processes that the script has started itself, which have no variable RANK.

    A process of torch 2.13 can hang at its end if a thread of gloo still waits for the GIL to let go of the last
    collective, by torchrun too (tests/scripts/common.py). The sleep gives it the GIL.
    """
    time.sleep(0.5)
    out = os.environ.get("COMPAT_OUT")
    if out:
        torch.save(module.state_dict(), Path(out) / f"rank{os.environ['RANK'] if rank is None else rank}.pt")
