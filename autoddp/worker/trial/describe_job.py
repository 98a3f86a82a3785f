"""Collects what the launcher has to know of the job before the first trial: its size, devices, knobs and link."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.bench import LinkFacts, LinkModel, load_cached
from autoddp.bench.result import backend_variables
from autoddp.codec import convert, plain, replace
from autoddp.cpus import usable_cpus
from autoddp.knobs import AnyKnob, Configuration, FirstLook, ObservedSteps, Setting, knobs_of, why_left_out
from autoddp.knobs.computing import CUDA_GRAPHS, OPTIMIZE_DDP, THREADS, thread_counts
from autoddp.knobs.ddp_arguments import ALSO_STATIC, BROADCAST_BUFFERS, FIND_UNUSED
from autoddp.knobs.env import NodeAndJob, start_settings
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS
from autoddp.recipe.match import AND
from autoddp.topology import Fingerprint, fingerprint, free_memory, usable_cores
from autoddp.topology.nccl.conf import as_nccl_sees
from autoddp.topology.nccl.tuner import nccl_tuner
from autoddp.topology.probe import probe
from autoddp.wire import JobFacts, Ready, WorkerConfig
from autoddp.wire.job_facts import where_uneven
from autoddp.wire.started_with import local_rank, started_with
from autoddp.worker.ddp.arguments import AVAILABLE_ARGUMENTS
from autoddp.worker.ddp.private import backend_of
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.effects.binding import Binding
from autoddp.worker.effects.threads import Threads, most_at_start
from autoddp.worker.gradients.buffers import why_alike
from autoddp.worker.observe.kernel_accounts import peak_memory
from autoddp.worker.process.device import frees_memory, name_of, nccl_version
from autoddp.worker.process.rank_store import RankStore

_MOST_OF_TCP = defaultdict(lambda: 10.0, nccl=25.0)  # Gbit/s


def gather_facts(
    wrapped: Sequence[Wrapped],
    ranks: RankStore,
    *,
    threads: Threads,
    binding: Binding,
    observed: ObservedSteps,
    in_page_faults: float,
    config: WorkerConfig,
) -> JobFacts:
    """The facts about the job, the same on every rank; all ranks call this together.

    `in_page_faults`: the share of the observed steps' time that page faults took on this rank, at most.
    """
    device = wrapped[0].parameters[0].device
    local = int(started_with("LOCAL_WORLD_SIZE", "1"))
    shares = thread_counts(usable_cpus(), local, threads.as_written)
    most = most_at_start()
    counts = [count for count in shares if count <= most]
    looks = not local_rank()  # one rank of a node looks at the machine for all of them
    machine = fingerprint() if looks else Fingerprint()
    free = [threads.pinned(), counts, binding.why_not]
    backend = backend_of(_ddp(wrapped[0]))
    # A few streams of TCP do not fill the fastest devices, however good they are.
    tcp = min(machine.tcp_gbps, _MOST_OF_TCP[backend])
    promised = (backend == "nccl" and machine.rdma_gbps(local)) or tcp if looks else None
    here = [machine.links, machine.network, promised, (usable_cores(), local), _versions(backend)]
    mine = [name_of(device), plain(observed), *free, *here, sorted(AVAILABLE_ARGUMENTS)]
    has_room = looks and device.type == "cpu" and free_memory() > local * peak_memory()
    starts = None
    if looks:
        starts = _start_settings(backend, device, ranks.nodes, config.interfaces, has_room * in_page_faults)
    of_all = ranks.gather([*mine, starts])
    facts = _facts(wrapped, ranks, of_all, config) if ranks.rank == 0 else None
    if facts:
        facts = replace(facts, link=_link(facts, Path(config.measured)))
    told = ranks.broadcast(Ready(facts) if facts else None)
    assert isinstance(told, Ready)
    return told.facts


def _versions(backend: str) -> tuple[str, str, str]:
    """Versions of torch, and where NCCL is used of CUDA and NCCL; a recipe has those of all hosts."""
    on_gpus = backend == "nccl"
    cuda, nccl = str(torch.version.cuda or ""), ".".join(map(str, nccl_version())) if on_gpus else ""
    return torch.__version__.split("+")[0], cuda if on_gpus else "", nccl


def _facts(wrapped: Sequence[Wrapped], ranks: RankStore, of_all: list[list[Any]], config: WorkerConfig) -> JobFacts:
    parts = zip(*of_all, strict=True)
    names, observed, pinned, counts, unbound, links, networks, promised, cores, versions, available, starts = parts
    of_torch, of_cuda, of_nccl = (AND.join(sorted({*kind} - {""})) for kind in zip(*versions, strict=True))
    backend = backend_of(_ddp(wrapped[0]))
    steps = [convert(one, ObservedSteps) for one in observed]
    asked: dict[AnyKnob, bool] = {ACCUMULATE_STEPS: config.accumulates, OPTIMIZE_DDP: config.recompiles}
    asked[CUDA_GRAPHS] = bool(steps[0].why_no_graphs)
    asked[BROADCAST_BUFFERS] = config.local_buffers
    options = {knob.option for knob, is_asked in asked.items() if is_asked}
    buffer_bytes = sum(w.buffer_bytes for w in wrapped)
    look = FirstLook(
        steps=steps,
        devices=frozenset(names),
        torch=of_torch,
        available_arguments=frozenset.intersection(*map(frozenset, available)),  # hosts may have several versions
        arguments=[w.arguments for w in wrapped],
        untouchable=next((why for w in wrapped if (why := w.why_untouchable())), ""),
        script_hook=any(w.script_hook is not None for w in wrapped),
        hook_sees_buckets=any(w.hook_sees_buckets for w in wrapped),
        sparse=any(w.is_sparse for w in wrapped),
        options=frozenset(options | ({ALSO_STATIC} if config.static_graph else set())),
        threads_pinned=next(filter(None, pinned), ""),
        thread_counts=counts,
        buffer_bytes=buffer_bytes,
        why_buffers_alike=next(filter(None, (why_alike(_ddp(w)) for w in wrapped if w.buffer_bytes)), ""),
        unbound=next(filter(None, unbound), ""),
    )
    knobs = knobs_of(look)
    settings = starts[0] if all(other in (None, starts[0]) for other in starts) else ()
    gradient_bytes = sum(p.numel() * p.element_size() for w in wrapped for p in w.parameters)
    fewest = min(cores, key=lambda one: one[0] / one[1])
    of_nodes = [local for (_, local), told in zip(cores, starts, strict=True) if told is not None]  # one rank of each
    largest = max(_ddp(w).process_group.size() for w in wrapped)
    return JobFacts(
        world_size=ranks.world_size,
        nodes=ranks.nodes,
        backend=backend,
        devices=tuple(sorted(set(names))),
        torch=of_torch,
        gradient_bytes=gradient_bytes,
        parameters_digest="+".join(dict.fromkeys(w.digest for w in wrapped)),
        ddp_arguments={name: _short(value) for w in wrapped for name, value in w.arguments.items()},
        knobs=knobs,
        find_unused_parameters=look.passes(FIND_UNUSED),
        left_out=why_left_out(look),
        micro_batches=steps[0].micro_batches / len(wrapped),
        backward_passes=min(one.passes for one in steps),
        matrix_shapes=len({(p.shape[0], p.shape[1:].numel()) for w in wrapped for p in w.parameters if p.dim() > 1}),
        links=tuple(sorted(set(links) - {""})) if backend == "nccl" else (),
        networks=tuple(sorted(set(networks) - {""})) if ranks.nodes > 1 else (),
        network_gbps=min(rate for rate in promised if rate is not None) if ranks.nodes > 1 else 0.0,
        cuda=of_cuda,
        nccl=of_nccl,
        start_settings=tuple(map(Configuration, settings)),
        cuda_graphs=look.graph_modes if CUDA_GRAPHS.name in knobs else (),
        compiles=look.compiled,
        gradient_shapes=tuple(tuple(p.shape) for w in wrapped for p in w.parameters),
        thread_counts=tuple(counts[0]) if THREADS.name in knobs else (),
        uses_all=all(one.uses_all for one in steps),
        buffer_bytes=buffer_bytes,
        cores=fewest[0],
        ranks_per_host=fewest[1],
        ranks_per_group=largest if largest < ranks.world_size else 0,
        ranks_of_nodes=where_uneven(of_nodes),
    )


def _start_settings(
    backend: str, device: torch.device, nodes: int, interfaces: str, in_page_faults: float
) -> list[Setting]:
    """Settings for another start of the script that may gain on this rank's node; tried where they may on all nodes."""
    nccl = backend == "nccl" and device.type == "cuda"
    environment = as_nccl_sees(os.environ) if nccl else os.environ
    around = NodeAndJob(
        node=probe() if nccl else None,
        nodes=nodes,
        environment=environment,
        nccl=nccl_version() if nccl else (),
        tuner=nccl_tuner(environment) if nccl else "",
        interfaces="" if backend == "nccl" else interfaces,
        frees_memory=frees_memory(device),
        in_page_faults=in_page_faults,
    )
    return start_settings(around)


def _link(facts: JobFacts, measured: Path) -> LinkModel | None:
    """The model of an all-reduce over all ranks, if `autoddp bench` has measured a world like this one.

    None for a job that reduces over a part of the ranks: nobody has measured that part alone.
    """
    if facts.ranks_per_group:
        return None
    devices = facts.devices if facts.backend == "nccl" else ("cpu",)
    variables = backend_variables(os.environ)
    here = LinkFacts(facts.world_size, facts.nodes, facts.backend, devices, facts.torch, variables)
    result = load_cached(measured, here)
    return next((s.model for s in result.sweeps if s.ranks == facts.world_size), None) if result else None


def _ddp(wrapped: Wrapped) -> DDP:
    assert wrapped.ddp is not None
    return wrapped.ddp


def _short(value: object) -> str:
    text = repr(value).splitlines()[0]
    return text if len(text) <= 60 else text[:57] + "..."
