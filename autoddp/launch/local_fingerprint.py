"""What is asked of this machine before anything is started: what a recipe is compared with, and its GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from autoddp.recipe import Fits
from autoddp.topology.naming import GLOO, NCCL, absent

_RDMA_DEVICES = Path("/sys/class/infiniband")


def known_here(fits: Fits) -> dict[str, object]:
    """The parts of `fits` that this node can tell by itself; nothing is asked that the recipe does not depend on."""
    on_gpus = fits.devices != ("cpu",)
    if not on_gpus and not fits.networks:
        return {}
    from autoddp.topology import fingerprint  # only where a recipe depends on the machine

    found = fingerprint()
    # Some of a workstation's GPUs may be another model's: one of the recipe's kind is enough.
    shared = tuple(set(found.devices) & set(fits.devices))
    known: dict[str, object] = {"devices": shared or found.devices or ("cpu",)} if on_gpus else {}
    known["links"] = (found.links,) if found.links else None
    known["networks"] = (found.network,) if found.network else None
    return known | (_versions() if fits.nccl else {})


def _versions() -> dict[str, object]:
    import torch

    known: dict[str, object] = {"cuda": torch.version.cuda}
    if torch.cuda.is_available():
        known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return known


def visible_gpus() -> int:
    """GPUs, or accelerators of another kind, that are visible to a process of this host. CUDA is not initialised."""
    import torch

    found = torch.cuda.device_count()
    others = getattr(torch, "accelerator", None)  # torch 2.6
    return found or (int(others.device_count()) if others is not None else 0)


def may_have_gpus(environment: Mapping[str, str]) -> bool:
    """Whether the ranks of this host may see a GPU, by the device files alone: nothing of CUDA is started."""
    if environment.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return False
    return Path("/dev/kfd").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def not_here(variables: Mapping[str, str]) -> dict[str, str]:
    """Which of `variables` name a network device that this host lacks: variable → "no interface eth7 here".

    What the user has set stays as it is, so a recipe's value for it does not count.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    devices = os.listdir(_RDMA_DEVICES) if _RDMA_DEVICES.is_dir() else []
    known = (
        (GLOO, "interface", interfaces),
        (NCCL, "interface", interfaces),
        ("NCCL_IB_HCA", "RDMA device", devices),
    )
    found = {}
    for variable, kind, here in known:
        value = variables.get(variable, "") if variable not in os.environ else ""
        missing = absent(variable, value, here) if value else []
        if missing:
            found[variable] = f"no {kind} {', '.join(missing)} here"
    return found
