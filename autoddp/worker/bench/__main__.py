"""One rank of `autoddp bench`. The first rank of each node writes the result, the same everywhere, for its launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoddp.bench import BenchResult, LinkFacts, Settings, layouts
from autoddp.bench.result import backend_variables
from autoddp.version import __version__
from autoddp.worker.bench.all_reduce import AllReduces
from autoddp.worker.bench.conduct import conduct
from autoddp.worker.bench.deadline import Deadline
from autoddp.worker.bench.hook_cost import HookCosts
from autoddp.worker.bench.lockstep import Lockstep
from autoddp.worker.bench.round_trip import round_trip
from autoddp.worker.process.rank_store import RankStore

_STARTING = 120.0  # seconds until all ranks have started and met, and beyond the budget until all have measured
_SIGNAL = 1.0  # seconds in which a signal reaches all ranks


def main() -> None:
    """Measure, and write the result; an error that the user has to correct is written as {"error": …}."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # elastic passes Ctrl-C on: it ends a rank, without a traceback
    place, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    deadline = Deadline()
    deadline.within(_STARTING, "waiting for all ranks to start")
    ranks = RankStore()
    settings = Settings(**ranks.share(settings))
    local = int(os.environ["LOCAL_RANK"])
    has_gpu = torch.cuda.is_available() and local < torch.cuda.device_count()
    of_all = ranks.gather([ranks.node, has_gpu, torch.cuda.get_device_name(local) if has_gpu else ""])
    world: dict[str, Any] = ranks.share(_world(of_all, settings.backend))
    deadline.within(_STARTING + 2 * settings.budget, "measuring")
    answer = world if "error" in world else _measure(ranks, world, settings, local)
    if local == 0:
        place.write_text(json.dumps(answer), encoding="utf-8")
    ranks.part()
    deadline.cancel()


def _world(of_all: list[list[Any]], backend: str) -> dict[str, Any]:
    """On rank 0: the backend, device names and each node's ranks, or an error. An empty dict on the other ranks."""
    if not of_all:
        return {}
    if len(of_all) == 1:
        return {"error": "with one rank there is nothing to measure; start two ranks on a host: --nproc-per-node 2"}
    all_have = all(has_gpu for _, has_gpu, _ in of_all)
    if backend == "nccl" and not all_have:
        without = next(rank for rank, (_, has_gpu, _) in enumerate(of_all) if not has_gpu)
        return {"error": f"--backend nccl needs a GPU for every rank, and rank {without} has none; use gloo"}
    backend = backend or ("nccl" if all_have else "gloo")
    nodes: dict[int, list[int]] = {}
    for rank, (node, _, _) in enumerate(of_all):
        nodes.setdefault(node, []).append(rank)
    devices = sorted({name for _, _, name in of_all}) if backend == "nccl" else ["cpu"]
    return {"backend": backend, "devices": devices, "nodes": list(nodes.values())}


def _measure(ranks: RankStore, world: Mapping[str, Any], settings: Settings, local: int) -> dict[str, Any]:
    """Run all measurements together with the other ranks; the result in JSON types, on every rank."""
    device = torch.device("cpu")
    if world["backend"] == "nccl":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group(world["backend"])
    trip = round_trip(ranks, world["nodes"])
    groups = layouts(world["nodes"])
    lockstep = Lockstep(ranks, {"reduce": AllReduces(groups, device).run, "hook": HookCosts(device).run})
    rooms = ranks.gather([_room(device)])
    plain: dict[str, Any] = {}
    if ranks.rank == 0:
        sweeps, hooks = conduct(lockstep, groups, settings, min(room for (room,) in rooms))
        lockstep.end()
        made_by = {"autoddp": __version__, "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
        plain = BenchResult(_facts(ranks, world), sweeps, hooks, made_by, trip).plain()
    else:
        lockstep.follow()
    plain = ranks.share(plain)
    dist.destroy_process_group()
    return plain


def _facts(ranks: RankStore, world: Mapping[str, Any]) -> LinkFacts:
    return LinkFacts(
        world_size=ranks.world_size,
        nodes=ranks.nodes,
        backend=world["backend"],
        devices=tuple(world["devices"]),
        torch=torch.__version__.split("+")[0],
        variables=backend_variables(os.environ),
    )


def _room(device: torch.device) -> int:
    """Bytes that a rank may use for the largest message: a quarter of the free memory, divided by the node's ranks.

    Only a quarter, because backends need scratch space of their own, and other programs run on the machine. On a GPU
    the free memory is that of the rank's own GPU, which it does not share.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not on every system
        return 2**30
    return int(free) // 4 // int(os.environ["LOCAL_WORLD_SIZE"])


if __name__ == "__main__":
    try:
        main()
    except RuntimeError:
        time.sleep(_SIGNAL)  # the peer that is gone may have ended by a signal that is still to reach this rank
        raise
