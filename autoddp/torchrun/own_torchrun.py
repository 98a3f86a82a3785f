"""torchrun for our own small jobs, with what elastic must know of this host and the others.

python -m autoddp.torchrun.own_torchrun --rdzv-backend autoddp-loopback …
"""

from __future__ import annotations

from autoddp.torchrun.jobs import be_torchrun

if __name__ == "__main__":
    be_torchrun()
