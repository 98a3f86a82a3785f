"""torchrun starts ranks again with the store that they had: what the start before has written there counts no more."""

from __future__ import annotations

import forks
import pytest
import torch.distributed as dist
from launchers import environment

SCRIPT = """
import inspect
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.ddp.private import hear_start, store_of

port, start, rank = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
# Gloo has no use for the addresses of the start before, so the groups are made in a store of this start.
dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.PrefixStore(str(start), store))
Patch().install()
for named, of in {"process_group": dist.new_group([0, 1]), "device_mesh": dist.init_device_mesh("cpu", (2,))}.items():
    theirs = store_of(DDP(torch.nn.Linear(4, 4), **{named: of}))
    theirs.add("autoddp/both", 1)
    dist.barrier()
    assert theirs.add("autoddp/both", 0) == 2
own = [dist.new_group([one]) for one in range(2)][rank]
named_alike = dist.PrefixStore("1/", store)  # as some versions of torch name groups that were split off at once
dist.distributed_c10d._world.pg_map[own] = ("gloo", named_alike)
split = DDP(torch.nn.Linear(4, 4), process_group=own)
dist.barrier()
hear_start(split, {})  # after the other group has told its start
store_of(split).set("autoddp/of", str(rank))
dist.barrier()
assert store_of(split).get("autoddp/of") == str(rank).encode()
if "init_sync" in inspect.signature(DDP.__init__).parameters:  # older versions of torch compare always
    apart = store_of(DDP(torch.nn.Linear(4, 4), init_sync=False))
    apart.set(f"autoddp/{rank}", "")
    apart.wait([f"autoddp/{1 - rank}"])
stores = dist.distributed_c10d._world.pg_map
stores[dist.group.WORLD] = ("gloo", dist.PrefixStore("default_pg", store))
first, second = (store_of(DDP(torch.nn.Linear(4, 4))) for _ in range(2))
assert not first.check(["autoddp/check/0/differs"])
dist.barrier()
first.set("autoddp/check/0/differs", "1 autoddp: planted")
assert second.check(["autoddp/check/0/differs"])
dist.barrier()
"""


@pytest.fixture(scope="module")
def agents_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("start", [1, 2])
def test_keys_of_the_start_before_are_not_seen(agents_store: dist.TCPStore, start: int) -> None:
    words = ["-c", SCRIPT, str(agents_store.port), str(start)]
    ranks = [forks.popen([*words, str(rank)], env=environment()) for rank in range(2)]
    assert [rank.wait(forks.PATIENCE) for rank in ranks] == [0, 0]
