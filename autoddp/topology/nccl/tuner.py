"""Finds a cloud's plugin that chooses NCCL's algorithms: where there is one, autoddp tries no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

_VARIABLES = ("NCCL_TUNER_PLUGIN", "NCCL_TUNER_CONFIG_PATH")
_NAMES = ("libnccl-tuner*.so*", "libnccl-ofi-tuner*.so*")
"""What NCCL looks for by itself, and what AWS calls its own."""
_NONE = ("", "none", "off")
_FOLDERS = (
    "usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/local/lib",
    "usr/local/gib/lib64", "usr/local/nvidia/lib64", "opt/amazon/ofi-nccl/lib", "opt/amazon/ofi-nccl/lib64",
    "opt/aws-ofi-nccl/lib",
)  # fmt: skip
"""Folders in which the loader, and the images of AWS and Google, have libraries."""


def nccl_tuner(environment: Mapping[str, str], root: Path = Path("/")) -> str:
    """The environment variable that names a plugin, or the path of its library; "" if there is none."""
    if environment.get(_VARIABLES[0], "unset").lower() in _NONE:
        return ""  # NCCL is told to load none
    for name in _VARIABLES:
        if name in environment:
            return f"{name}={environment[name]}"
    return next((str(found) for folder in _folders(environment, root) for found in _libraries(folder)), "")


def _folders(environment: Mapping[str, str], root: Path) -> Iterator[Path]:
    yield from (Path(name) for name in environment.get("LD_LIBRARY_PATH", "").split(":") if name)
    yield from (root / name for name in _FOLDERS)


def _libraries(folder: Path) -> list[Path]:
    try:
        return sorted(found for name in _NAMES for found in folder.glob(name))
    except OSError:  # it may not be read
        return []
