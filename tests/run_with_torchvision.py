"""Run a script that uses torchvision, also beside a CPU build of torch.

    torchrun --nproc-per-node 2 tests/run_with_torchvision.py recipes/vit/train.py --model tiny --steps 20

The script sees its own path and arguments in sys.argv, and itself as `__main__`.
"""

import runpy
import sys
from pathlib import Path

import torchvision_on_cpu  # noqa: F401

if len(sys.argv) < 2:
    sys.exit("usage: run_with_torchvision.py SCRIPT [ARGUMENT ...]")
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
