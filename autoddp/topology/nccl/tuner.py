"""Finds a cloud's plugin that chooses NCCL's algorithms: where there is one, autoddp tries no others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

_TUNER, _NET = "NCCL_TUNER_PLUGIN", "NCCL_NET_PLUGIN"
_VARIABLES = (_TUNER, "NCCL_TUNER_CONFIG_PATH")
_NAMES = ("libnccl-tuner*.so*", "libnccl-ofi-tuner*.so*", "libnccl-net*.so*")
"""What NCCL looks for by itself, and what AWS calls its own. Where there is no tuner alone, NCCL takes that in the
plugin of the network, if it has one (src/plugin/tuner.cc), as AWS's has."""
_NONE = "none"  # in place of a plugin's name; an empty one counts as not set
_SYMBOL = b"ncclTunerPlugin_v"  # the beginning of the name by which NCCL knows a tuner
_FOLDERS = (
    "usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/local/lib",
    "usr/local/gib/lib64", "usr/local/nvidia/lib64", "opt/amazon/ofi-nccl/lib", "opt/amazon/ofi-nccl/lib64",
    "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", "opt/amazon/ofi-nccl/lib/aarch64-linux-gnu", "opt/aws-ofi-nccl/lib",
)  # fmt: skip
"""Folders in which the loader, and the images of AWS and Google, have libraries."""
_LOADED = Path("/proc/self/maps")


def nccl_tuner(environment: Mapping[str, str], root: Path = Path("/"), loaded: Path = _LOADED) -> str:
    """The environment variable that names a plugin, or the path of its library; "" if there is none.

    `loaded`: the kernel's list of what this process has loaded: in a rank NCCL has found its plugins already.
    """
    if environment.get(_TUNER, "").lower() == _NONE:
        return ""
    for name in _VARIABLES:
        if environment.get(name):
            return f"{name}={environment[name]}"
    found = [*_named(environment), *_mapped(loaded)]
    found += [library for folder in _folders(environment, root) for library in _libraries(folder)]
    return next((str(library) for library in found if _is_tuner(library)), "")


def _named(environment: Mapping[str, str]) -> Iterator[Path]:
    yield from (Path(name) for name in environment.get(_NET, "").split(",") if "/" in name)


def _mapped(loaded: Path) -> list[Path]:
    """Plugins that the loader has found for NCCL, wherever they are."""
    with contextlib.suppress(OSError):  # no Linux
        lines = loaded.read_text(errors="replace").splitlines()
        paths = {Path(line[line.index("/") :]) for line in lines if "/" in line}
        return sorted(path for path in paths if any(path.match(name) for name in _NAMES))
    return []


def _folders(environment: Mapping[str, str], root: Path) -> Iterator[Path]:
    yield from (Path(name) for name in environment.get("LD_LIBRARY_PATH", "").split(":") if name)
    yield from (root / name for name in _FOLDERS)


def _libraries(folder: Path) -> list[Path]:
    try:
        return sorted(found for name in _NAMES for found in folder.glob(name))
    except OSError:  # it may not be read
        return []


def _is_tuner(library: Path) -> bool:
    """Whether it is one by its name, or has one in it."""
    if "tuner" in library.name:
        return True
    with contextlib.suppress(OSError):
        return _SYMBOL in library.read_bytes()
    return False
