"""Communication between ranks through the job's own store, never through the process group.

A collective of autoddp's between those of the script would change the order that the backend relies on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from autoddp.wire import Message, decode, encode
from autoddp.wire.started_with import started_with
from autoddp.worker.process.clock_offset import ClockOffset, Now, answer, ask, clock_name

_PART = 4 * 2**20  # bytes of a value: torch's store closes the connection at 8 MiB
_PATIENCE = timedelta(hours=2)  # long, because one rank may evaluate alone for long; the launcher detects hangs
_CONNECTS = timedelta(minutes=1)  # the store is there; a rank may be allowed to open no more files, or be cut off


class RankStore:
    """Rank 0 gathers and broadcasts values. Every rank must call the same methods in the same order.

    Each call costs one or two round trips to the store. Calls are made outside of timed blocks. Making one raises
    torch's RuntimeError where the store cannot be reached within a minute.
    """

    def __init__(self) -> None:
        self.rank = int(started_with("RANK"))
        self.world_size = int(started_with("WORLD_SIZE"))
        self.node = int(started_with("GROUP_RANK", "0"))
        self.nodes = int(started_with("GROUP_WORLD_SIZE", "1"))
        # The store there is that of the elastic agent. If it is rank 0's, it is where the script wants it.
        is_agents = started_with("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        told = started_with if is_agents else os.environ.__getitem__
        store = TCPStore(told("MASTER_ADDR"), int(told("MASTER_PORT")), None, False, _CONNECTS)
        store.set_timeout(_PATIENCE)
        self._store = PrefixStore(f"autoddp/{started_with('TORCHELASTIC_RUN_ID', '')}", store)
        self._turn = 0

    def missing(self, seconds: float) -> list[int]:
        """The ranks that have not called this within that time."""
        keys = [f"here/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], "")
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:  # torch's of a wait that has taken too long
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        return []

    def once_all_have(self, what: str, mine: int) -> int | None:
        """None until all ranks have called this with that word; then the number of the first rank that has seen so.

        Nobody waits: call it again and again.
        """
        self._store.set(f"{what}/{self.rank}", "")
        if not self._store.check([f"{what}/{rank}" for rank in range(self.world_size)]):
            return None
        return int(self._store.compare_set(what, "", str(mine)))

    def gather(self, values: Sequence[Any]) -> list[list[Any]]:
        """The values of all ranks (JSON types), by rank, on rank 0; an empty list on the other ranks."""
        self._turn += 1
        if self.rank != 0:
            self._put(f"{self._turn}/{self.rank}", json.dumps(list(values)))
            return []
        others = [self._get(f"{self._turn}/{rank}") for rank in range(1, self.world_size)]
        return [list(values), *(json.loads(text) for text in others)]

    def broadcast(self, message: Message | None) -> Message:
        """Return rank 0's message on every rank; the other ranks pass None."""
        self._turn += 1
        key = f"{self._turn}/0"
        if message is not None:
            self._put(key, encode(message).decode())
            return message
        return decode(self._get(key))

    def share(self, value: Any) -> Any:
        """Return rank 0's value (JSON types) on every rank; the values that the others pass are ignored."""
        self._turn += 1
        key = f"{self._turn}/0"
        if self.rank == 0:
            self._put(key, json.dumps(value))
            return value
        return json.loads(self._get(key))

    def wait_for_turn(self, seconds: float) -> bool:
        """Wait until all ranks before this one have called `end_turn`, but not longer than that. Whether they have."""
        self._turn += 1
        before = [f"{self._turn}/ended/{rank}" for rank in range(self.rank)]
        try:
            if before:
                self._store.wait(before, timedelta(seconds=seconds))
        except RuntimeError:  # torch's of a wait that has taken too long
            return False
        return True

    def end_turn(self) -> None:
        """Let the next rank begin that waits for its turn."""
        self._store.set(f"{self._turn}/ended/{self.rank}", "")

    def _put(self, key: str, text: str) -> None:
        """Put a text of any length there; it is ASCII, as all JSON of Python's module."""
        first, *others = [text[begin : begin + _PART] for begin in range(0, max(1, len(text)), _PART)]
        for number, part in enumerate(others):
            self._store.set(f"{key}/{number}", part)
        self._store.set(key, f"{len(others)} {first}")  # last, because the others are read after this one

    def _get(self, key: str) -> bytes:
        """Wait for a text of `_put`."""
        count, _, first = self._store.get(key).partition(b" ")
        return bytes(first) + b"".join(self._store.get(f"{key}/{number}") for number in range(int(count)))

    def clock_offset(self, now: Now = time.perf_counter, name: str | None = None) -> ClockOffset:
        """How far the clock `now` is from that of rank 0. Ranks with the same `name` of their clock read one clock."""
        own = clock_name() if name is None else name
        names = self.gather([own])
        names_of_all = self.share([one for (one,) in names])
        key = f"{self._turn}/clock"
        if self.rank == 0:
            for rank in range(1, self.world_size):
                if not _is_one_clock(names_of_all, rank):
                    answer(self._store, f"{key}/{rank}", now)
            return ClockOffset()
        return ClockOffset() if _is_one_clock(names_of_all, self.rank) else ask(self._store, f"{key}/{self.rank}", now)

    def part(self) -> None:
        """Wait until all ranks have called this. It is the last call, made when their devices have finished.

        The wait is needed because network threads of a rank may still be sending when its device has finished. Rank 0
        may host the store, so it also waits until all have read its answer.
        """
        self.gather([])
        self.share(None)
        self.gather([])


def _is_one_clock(names: Sequence[str], rank: int) -> bool:
    return bool(names[0]) and names[rank] == names[0]
