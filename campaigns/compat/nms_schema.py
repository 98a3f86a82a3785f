"""Lets torchvision be imported beside a CPU build of torch, without a line in the scripts; see torchvision_on_cpu.py.

Most libraries import torchvision if it is installed. torch calls `define` at the end of its own import, because of the
entry point that `announce` writes.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import torch

_LIBRARIES: list[torch.library.Library] = []
"""The schemas live as long as these objects."""


@functools.cache
def is_needed() -> bool:
    """Whether the installed torchvision, if there is one, was made for another torch.

    Tried in a process of its own: a module that could not be imported fails otherwise the second time.
    """
    tried = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    return "torchvision::nms" in tried.stderr


def define() -> None:
    """The operators that torchvision's compiled part would have defined."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def announce(folder: Path) -> None:
    """Make `folder` one that, on PYTHONPATH, lets `import torch` call `define`."""
    package = folder / "nms_schema-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nms-schema\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nnms_schema = nms_schema:define\n")
