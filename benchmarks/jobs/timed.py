"""Run a training script, and write down when each optimizer step ended.

    torchrun --nproc-per-node 2 benchmarks/jobs/timed.py FOLDER recipes/digits/train.py --epochs 4

Each rank writes one line for each step to FOLDER/RANK: seconds by a clock of its own, of which only differences mean
something. The script sees its own path and arguments in sys.argv, and itself as `__main__`. It needs no option for it.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


def write_times(folder: Path) -> None:
    """From now on each optimizer step adds a line."""
    # Unbuffered: scripts that leave by os._exit would lose what a buffer holds. A line costs a few microseconds.
    file = os.open(folder / os.environ["RANK"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def write(*_: object) -> None:
        os.write(file, f"{time.perf_counter()}\n".encode())

    register_optimizer_step_post_hook(write)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: timed.py FOLDER SCRIPT [ARGUMENT ...]")
    write_times(Path(sys.argv[1]))
    del sys.argv[:2]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
