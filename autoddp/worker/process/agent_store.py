"""Lets the ranks that a script starts by itself find each other under torchrun, as they do without it.

torchrun tells each rank by a variable that its agent has a store at MASTER_ADDR:MASTER_PORT, which the ranks then only
connect to. The processes that a script starts, by `mp.spawn` for example, inherit the variable. If the script gives
them another port, no agent is there, none of them makes the store, and all of them wait for it until they give up.

So the variable counts at the agent's own port alone. At every other port torch does what it does without torchrun: rank
0 makes the store. The variable itself, and what the script sets, stay as they are.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"


def agents_store_is_at(port: str) -> None:
    """From here on the agent has its store at that port alone; "" where no agent is known. Imports torch."""
    # By its whole name: torch.distributed has a function of the same name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    before = getattr(rendezvous, "_create_c10d_store", None)
    if before is None or not port:
        return

    @functools.wraps(before)
    def create(hostname: str, where: Any, *args: Any, **kwargs: Any) -> Any:
        says = os.environ.get(_VARIABLE)
        if says is None or str(where) == port:
            return before(hostname, where, *args, **kwargs)
        del os.environ[_VARIABLE]
        try:
            return before(hostname, where, *args, **kwargs)
        finally:
            os.environ[_VARIABLE] = says

    rendezvous._create_c10d_store = create
