"""One rank of the short benchmark that judges an env setting. It sends what a step sends, all buckets at once.

`autoddp bench` measures one all-reduce after another. The gain of a setting under which several all-reduces run side by
side shows only here.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoddp.bench.burst import Burst
from autoddp.worker.process.device import synchronize
from autoddp.worker.process.rank_store import RankStore

_PATIENCE = timedelta(seconds=30)  # a setting under which nothing arrives must fail soon
_SECONDS = 1.0  # length of all bursts together: the ranks of the script wait while they run
_CHECKS = 3
_FEWEST, _MOST = 2, 20  # bursts: an interval needs two, and more than twenty hardly make it narrower


def main() -> None:
    """Run the bursts; each node's first rank writes {"seconds": one value for each burst}, the same on all nodes."""
    place, burst = Path(sys.argv[1]), Burst(**json.loads(sys.argv[2]))
    ranks = RankStore()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if burst.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(burst.backend, timeout=_PATIENCE)
    # Zeros, because repeated sums of other values would overflow; the time does not depend on the values.
    buckets = [torch.zeros(burst.bucket_bytes // 4, device=device) for _ in range(burst.buckets)]
    # DDP broadcasts parameters and buffers: a setting under which NCCL has no broadcast would end the script's job.
    dist.broadcast(buckets[0], src=0)
    _seconds(buckets)  # sets up connections
    _check(buckets)
    pilot = ranks.share(_seconds(buckets))
    count = max(_FEWEST, min(_MOST, math.ceil(_SECONDS / pilot)))
    of_all: list[list[Any]] = ranks.gather([_seconds(buckets) for _ in range(count)])
    means = ranks.share([sum(of_one) / len(of_one) for of_one in zip(*of_all, strict=True)])
    dist.destroy_process_group()
    if local == 0:
        place.write_text(json.dumps({"seconds": means}), encoding="utf-8")
    ranks.part()


def _check(buckets: list[torch.Tensor]) -> None:
    """SystemExit unless all-reduces give the sum over the ranks. A setting may be fast because data are lost.

    On some machines an IOMMU drops what one GPU copies to another (NCCL_P2P_LEVEL), and no call reports it. The buckets
    have zeros again afterwards.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for number in range(1, _CHECKS + 1):
        for bucket in buckets:
            bucket.fill_(number * (rank + 1))
        _seconds(buckets)
        if not all(bool((bucket == number * ranks * (ranks + 1) // 2).all()) for bucket in buckets):
            raise SystemExit("wrong sums")
    for bucket in buckets:
        bucket.zero_()


def _seconds(buckets: list[torch.Tensor]) -> float:
    synchronize(buckets[0].device)
    dist.barrier()
    began = time.perf_counter()
    works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
    for work in works:
        work.wait()
    synchronize(buckets[0].device)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
