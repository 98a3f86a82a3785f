"""What the worker can say about the job before the first trial, and which knobs it can turn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.bench import LinkFacts, load_cached
from autoddp.bench.result import backend_variables
from autoddp.knobs import BY_NAME
from autoddp.knobs.binding import NUMA_BINDING
from autoddp.knobs.cuda_graphs import CUDA_GRAPHS
from autoddp.knobs.env import ALLOCATOR, INTERFACES
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS
from autoddp.knobs.optimize_ddp import OPTIMIZE_DDP, ways_to_cut
from autoddp.knobs.threads import THREADS, thread_counts
from autoddp.topology import Fingerprint, fingerprint
from autoddp.topology.nccl_tuner import nccl_tuner
from autoddp.topology.probe import probe
from autoddp.topology.start_settings import nccl_settings
from autoddp.units import MIB
from autoddp.wire import JobFacts, Ready
from autoddp.worker.applicability import Watched, graph_modes, why_left_out, why_no_threads
from autoddp.worker.binding import Binding
from autoddp.worker.ddp import Wrapped, backend_of
from autoddp.worker.rank_store import Ranks
from autoddp.worker.threads import Threads, most_at_start, usable_cpus
from autoddp.worker.worker_config import Order


def gather_facts(
    wrapped: Sequence[Wrapped],
    ranks: Ranks,
    threads: Threads,
    binding: Binding,
    watched: Watched,
    order: Order,
) -> JobFacts:
    """The same facts on every rank; all ranks call this together."""
    device = wrapped[0].parameters[0].device
    shares = thread_counts(usable_cpus(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), threads.as_written)
    most = most_at_start()
    counts = [count for count in shares if count <= most]
    looks = os.environ.get("LOCAL_RANK", "0") == "0"  # one rank of a node looks at the machine for all of them
    machine = fingerprint() if looks else Fingerprint()
    free = [threads.pinned(), counts, binding.why_not]
    mine = [_device_name(device), asdict(watched), *free, machine.links, machine.network]
    starts = _start_settings(backend_of(_ddp(wrapped[0])), device, ranks.nodes, order.interfaces) if looks else None
    of_all = ranks.gather([*mine, starts])
    facts = _facts(wrapped, ranks, of_all, order) if ranks.rank == 0 else None
    if facts:
        facts = replace(facts, link=_link(facts, Path(order.measured)))
    told = ranks.broadcast(Ready(facts) if facts else None)
    assert isinstance(told, Ready)
    return told.facts


def _facts(wrapped: Sequence[Wrapped], ranks: Ranks, of_all: list[list[Any]], order: Order) -> JobFacts:
    names, watched, pinned, counts, unbound, links, networks, starts = zip(*of_all, strict=True)
    backend = backend_of(_ddp(wrapped[0]))
    steps = [Watched(**{**plain, "forwards": tuple(plain["forwards"])}) for plain in watched]
    not_asked = set() if order.accumulates else {ACCUMULATE_STEPS.name}
    not_asked |= set() if order.recompiles else {OPTIMIZE_DDP.name}
    not_asked |= set() if steps[0].why_no_graphs else {CUDA_GRAPHS.name}
    left_out = why_left_out(wrapped, steps, set(names), not_asked)
    left_out |= why_no_threads(set(names), next(filter(None, pinned), ""), counts)
    if any(unbound):
        left_out[NUMA_BINDING.name] = next(filter(None, unbound))
    knobs = tuple(name for name in BY_NAME if name not in left_out.keys() | not_asked)
    gradient_bytes = sum(p.numel() * p.element_size() for w in wrapped for p in w.parameters)
    return JobFacts(
        world_size=ranks.world_size,
        nodes=ranks.nodes,
        backend=backend,
        devices=tuple(sorted(set(names))),
        torch=torch.__version__.split("+")[0],
        gradient_bytes=gradient_bytes,
        parameters_digest="+".join(dict.fromkeys(w.digest for w in wrapped)),
        ddp_arguments={name: _short(value) for w in wrapped for name, value in w.arguments.items()},
        knobs=knobs,
        left_out=left_out,
        micro_steps=steps[0].micro_steps / len(wrapped),
        matrix_shapes=len({(p.shape[0], p.shape[1:].numel()) for w in wrapped for p in w.parameters if p.dim() > 1}),
        links=tuple(sorted(set(links) - {""})) if backend == "nccl" else (),
        networks=tuple(sorted(set(networks) - {""})) if ranks.nodes > 1 else (),
        cuda=str(torch.version.cuda or "") if backend == "nccl" else "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else "",
        start_settings=tuple(starts[0]) if all(other in (None, starts[0]) for other in starts) else (),
        cuda_graphs=() if CUDA_GRAPHS.name in left_out else graph_modes(steps),
        compiles=any(one.compiled for one in steps),
        ways_to_cut=tuple(ways_to_cut(gradient_bytes / MIB)) if OPTIMIZE_DDP.name in knobs else (),
        thread_counts=() if THREADS.name in left_out else tuple(counts[0]),
    )


def _start_settings(backend: str, device: torch.device, nodes: int, interfaces: str) -> list[dict[str, Any]]:
    """What another start of the script could set, as this rank's node sees it; only what all nodes see is tried."""
    found = _allocator_settings(device)
    if backend == "nccl":
        if device.type != "cuda":
            return found
        version, tuner = tuple(torch.cuda.nccl.version()), nccl_tuner(os.environ)
        return found + nccl_settings(probe(), nodes, os.environ, version, tuner)
    return found + ([{INTERFACES.name: interfaces}] if interfaces and nodes > 1 else [])


def _link(facts: JobFacts, measured: Path) -> dict[str, Any]:
    """What `autoddp bench` has measured in a world like this one, if it has: of all ranks together."""
    devices = facts.devices if facts.backend == "nccl" else ("cpu",)
    variables = backend_variables(os.environ)
    here = LinkFacts(facts.world_size, facts.nodes, facts.backend, devices, facts.torch, variables)
    result = load_cached(measured, here)
    model = next((s.model for s in result.sweeps if s.ranks == facts.world_size), None) if result else None
    return model.plain() if model else {}


def _allocator_settings(device: torch.device) -> list[dict[str, Any]]:
    """Where torch had to give memory back and ask again: segments that grow leave no holes to fill."""
    if device.type != "cuda" or {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(os.environ):
        return []
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    return [{ALLOCATOR.name: "expandable_segments:True"}] if retries else []


def _ddp(wrapped: Wrapped) -> DDP:
    assert wrapped.ddp is not None
    return wrapped.ddp


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return device.type


def _short(value: object) -> str:
    text = repr(value).splitlines()[0]
    return text if len(text) <= 60 else text[:57] + "..."
