"""Whether torch.compile cuts a model's graph where DDP's buckets end. Torch's own name for it."""

from __future__ import annotations

from typing import Any

from autoddp.knobs.base import Knob, boolean, exact
from autoddp.knobs.buckets import BUCKET_CAP_MB, caps

_FIRST_PIECE_MIB = 1.0  # torch.compile's first piece, and it refuses any cap below

OPTIMIZE_DDP = Knob(
    name="optimize_ddp",
    says="true: torch.compile cuts the model where buckets end, and they travel during backward; false: it stays whole",
    check=boolean,
    rung_of=exact,
    ddp_argument=False,
)


def ways_to_cut(gradient_mib: float) -> list[dict[str, Any]]:
    """Settings worth another compilation each, for that many MiB of gradients: one piece, about four, about sixteen.

    >>> ways_to_cut(30.0)[1]
    {'optimize_ddp': True, 'bucket_cap_mb': 8.0}

    The cap and the cuts belong together: a cut within a bucket gains nothing, and a bucket over two pieces waits.
    """
    sizes = caps(gradient_mib)
    whole = [{OPTIMIZE_DDP.name: False, BUCKET_CAP_MB.name: sizes[-1]}]
    pieces = [size for size in (sizes[-1] / 4, sizes[-1] / 16) if size >= _FIRST_PIECE_MIB]
    return whole + [{OPTIMIZE_DDP.name: True, BUCKET_CAP_MB.name: size} for size in pieces]
