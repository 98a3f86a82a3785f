"""What of this machine is compared with a recipe, before anything is started."""

from __future__ import annotations

from autoddp.recipe import Fits


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
