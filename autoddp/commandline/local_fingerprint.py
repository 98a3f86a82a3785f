"""What autoddp looks up about this machine before it starts anything: its GPUs, and what a recipe is compared with."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from autoddp.processes.silence import awaiting
from autoddp.recipe import Fits
from autoddp.topology.nccl.interface_names import GLOO, NCCL, absent

_DRIVER = "this host's GPU driver"  # which may hang for ever where a GPU has fallen off the bus
_RDMA_DEVICES = Path("/sys/class/infiniband")


def known_here(fits: Fits) -> dict[str, object]:
    """The values of `fits` that this node can know by itself; only those that the recipe depends on are looked up."""
    on_gpus = fits.devices != ("cpu",)
    if not on_gpus and not fits.networks:
        return {}
    from autoddp.topology import fingerprint  # only where a recipe depends on the machine

    with awaiting(_DRIVER):
        found = fingerprint()
    # A workstation may have GPUs of several models: one of the recipe's is enough. A rank that has a part of a GPU
    # calls it by the names of both (MIG), and the driver tells only that of the GPU.
    shared = tuple(name for name in fits.devices if name.partition(" MIG ")[0] in found.devices)
    # Of AMD's GPUs, and under WSL, nothing here tells the names.
    here = shared or found.devices or (None if visible_gpus() else ("cpu",))
    known: dict[str, object] = {"devices": here} if on_gpus else {}
    known["links"] = (found.links,) if found.links else None
    known["networks"] = (found.network,) if found.network else None
    if fits.nccl:
        import torch

        known["cuda"] = torch.version.cuda
        if version := nccl_here():
            known["nccl"] = ".".join(map(str, version))
    return known


@awaiting(_DRIVER)
def nccl_here() -> tuple[int, ...]:
    """The version of the NCCL that torch brings; empty where no GPU is visible."""
    import torch

    return tuple(torch.cuda.nccl.version()) if torch.cuda.is_available() else ()


@awaiting(_DRIVER)
def visible_gpus() -> int:
    """GPUs, or accelerators of another kind, that are visible to a process of this host. CUDA is not initialised."""
    import torch

    found = torch.cuda.device_count()
    others = getattr(torch, "accelerator", None)  # torch 2.6
    return found or (int(others.device_count()) if others is not None else 0)


def may_have_gpus(environment: Mapping[str, str]) -> bool:
    """Whether the ranks of this host may see a GPU, judged by device files alone: CUDA is not initialised."""
    if environment.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return False
    return Path("/dev/kfd").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def not_here(variables: Mapping[str, str]) -> dict[str, str]:
    """Which of `variables` name a network device that this host lacks: variable → "no interface eth7 here".

    Variables that the user has set are not looked at, because the user's value is used.
    """
    interfaces = ("interface", [name for _, name in socket.if_nameindex()])
    devices = ("RDMA device", os.listdir(_RDMA_DEVICES) if _RDMA_DEVICES.is_dir() else [])
    found = {}
    for variable, (kind, here) in {GLOO: interfaces, NCCL: interfaces, "NCCL_IB_HCA": devices}.items():
        value = variables.get(variable, "") if variable not in os.environ else ""
        if value and (missing := absent(variable, value, here)):
            found[variable] = f"no {kind} {', '.join(missing)} here"
    return found
