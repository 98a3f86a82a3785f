"""How the ranks agree, through the job's own store and never through the process group.

A collective of ours between the script's would change the order that the backend relies on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from autoddp.wire import Message, decode, encode

_PATIENCE = timedelta(hours=2)  # a rank may evaluate alone for long; a hang is the launcher's to judge


class Ranks:
    """Rank 0 gathers and broadcasts; every rank calls the same methods in the same order.

    Cost: one or two round trips to the store per call, outside any timing.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.node = int(os.environ.get("GROUP_RANK", "0"))
        self.nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        # The store that torchrun's environment names: the agent's, or rank 0's own.
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, _PATIENCE)
        self._store = PrefixStore(f"autoddp/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
        self._turn = 0

    def gather(self, values: Sequence[Any]) -> list[list[Any]]:
        """On rank 0 the values of all ranks (JSON types), elsewhere an empty list."""
        self._turn += 1
        if self.rank != 0:
            self._store.set(f"{self._turn}/{self.rank}", json.dumps(list(values)))
            return []
        others = [self._store.get(f"{self._turn}/{rank}") for rank in range(1, self.world_size)]
        return [list(values), *(json.loads(text) for text in others)]

    def broadcast(self, message: Message | None) -> Message:
        """Rank 0's message on every rank."""
        self._turn += 1
        key = f"{self._turn}/0"
        if message is not None:
            self._store.set(key, encode(message).decode())
            return message
        return decode(self._store.get(key))

    def share(self, value: Any) -> Any:
        """Rank 0's value (JSON types) on every rank; what the others hand in is not looked at."""
        self._turn += 1
        key = f"{self._turn}/0"
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        return json.loads(self._store.get(key))

    def part(self) -> None:
        """The last thing the ranks do together: none goes before all have come here, with their devices' work done.

        A rank's network threads may still be sending when its device has finished. And rank 0, which may host the
        store, waits until all have read its answer.
        """
        self.gather([])
        self.share(None)
        self.gather([])
