"""What the worker can say about the job before the first trial, and which knobs it can turn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoddp.bench import LinkFacts, load_cached
from autoddp.bench.result import backend_variables
from autoddp.knobs import BY_NAME
from autoddp.knobs.binding import NUMA_BINDING
from autoddp.knobs.micro_steps import ACCUMULATE_STEPS, DEFER_REDUCTIONS
from autoddp.knobs.start import ALLOCATOR, INTERFACES
from autoddp.knobs.threads import THREADS, thread_counts
from autoddp.topology import Fingerprint, fingerprint
from autoddp.topology.probe import probe
from autoddp.topology.start_settings import nccl_settings
from autoddp.wire import JobFacts, Ready
from autoddp.worker.ddp import AVAILABLE_ARGUMENTS, Wrapped, parameters_digest
from autoddp.worker.order import Order
from autoddp.worker.processors import Processors
from autoddp.worker.ranks import Ranks
from autoddp.worker.threads import usable_cpus

_HOOK_KNOBS = ("hook", "powersgd_rank", "powersgd_start_step")
_BUCKET_KNOBS = ("bucket_cap_mb", "bucket_cap_mb_list")


@dataclass(frozen=True)
class Watched:
    """What the script's first steps have shown."""

    is_static: bool
    """Every gradient became ready once per step, in one order."""
    forwards: tuple[int, ...]
    """Reducing forward passes of each step, over all DDP objects."""
    steps_by_closure: bool
    clears: bool
    """It calls `zero_grad`."""
    one_optimizer: bool
    """It steps all that DDP reduces."""

    @property
    def micro_steps(self) -> float:
        """Mean reducing forward passes of a step."""
        return sum(self.forwards) / len(self.forwards) if self.forwards else 1.0


def gather_facts(
    wrapped: Sequence[Wrapped],
    ranks: Ranks,
    processors: Processors,
    watched: Watched,
    order: Order,
) -> JobFacts:
    """The same facts on every rank; all ranks call this together."""
    threads = processors.threads
    device = wrapped[0].parameters[0].device
    counts = thread_counts(usable_cpus(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), threads.as_written)
    looks = os.environ.get("LOCAL_RANK", "0") == "0"  # one rank of a node looks at the machine for all of them
    machine = fingerprint() if looks else Fingerprint()
    free = [threads.pinned(), counts, processors.binding.why_not]
    mine = [_device_name(device), asdict(watched), *free, machine.links, machine.network]
    of_all = ranks.gather([*mine, _start_settings(device, ranks.nodes, order.interfaces) if looks else None])
    facts = _facts(wrapped, ranks, of_all, order.accumulates) if ranks.rank == 0 else None
    if facts:
        facts = replace(facts, link=_link(facts, Path(order.measured)))
    told = ranks.broadcast(Ready(facts) if facts else None)
    assert isinstance(told, Ready)
    return told.facts


def _facts(wrapped: Sequence[Wrapped], ranks: Ranks, of_all: list[list[Any]], accumulates: bool) -> JobFacts:
    names, watched, pinned, counts, unbound, links, networks, starts = zip(*of_all, strict=True)
    backend = dist.get_backend(_process_group(wrapped[0]))
    steps = [Watched(**{**plain, "forwards": tuple(plain["forwards"])}) for plain in watched]
    left_out = why_left_out(wrapped, all(one.is_static for one in steps))
    left_out |= _why_no_deferral(wrapped, steps)
    not_asked = set() if accumulates else {ACCUMULATE_STEPS.name}
    left_out |= _why_no_accumulation(steps) if accumulates else {}
    left_out |= _why_no_threads(set(names), next(filter(None, pinned), ""), counts)
    if any(unbound):
        left_out[NUMA_BINDING.name] = next(filter(None, unbound))
    return JobFacts(
        world_size=ranks.world_size,
        nodes=ranks.nodes,
        backend=backend,
        devices=tuple(sorted(set(names))),
        torch=torch.__version__.split("+")[0],
        gradient_bytes=sum(p.numel() * p.element_size() for w in wrapped for p in w.parameters),
        parameters_digest="+".join(dict.fromkeys(parameters_digest(_module(w)) for w in wrapped)),
        ddp_arguments={name: _short(value) for w in wrapped for name, value in w.arguments.items()},
        knobs=tuple(name for name in BY_NAME if name not in left_out.keys() | not_asked),
        left_out=left_out,
        micro_steps=steps[0].micro_steps / len(wrapped),
        links=tuple(sorted(set(links) - {""})) if backend == "nccl" else (),
        networks=tuple(sorted(set(networks) - {""})) if ranks.nodes > 1 else (),
        cuda=str(torch.version.cuda or "") if backend == "nccl" else "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else "",
        start_settings=tuple(starts[0]) if all(other in (None, starts[0]) for other in starts) else (),
        thread_counts=() if THREADS.name in left_out else tuple(counts[0]),
    )


def _start_settings(device: torch.device, nodes: int, interfaces: str) -> list[dict[str, Any]]:
    """What another start of the script could set, as this rank's node sees it; only what all nodes see is tried."""
    found = _allocator_settings(device)
    if dist.get_backend() == "nccl":
        return found + (nccl_settings(probe(), nodes, os.environ) if device.type == "cuda" else [])
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


def _why_no_deferral(wrapped: Sequence[Wrapped], steps: Sequence[Watched]) -> dict[str, str]:
    """Why no reduction can be put off."""
    counts = {count for one in steps for count in one.forwards}
    why = ""
    if len(wrapped) > 1 or any(one.steps_by_closure for one in steps):
        why = "backward passes are not one step's alone (several DDP models, or a closure)"
    elif len(counts) != 1:
        why = "steps differ in their number of reductions"
    elif max(counts) < 2:
        why = "each step has one reduction"
    return {DEFER_REDUCTIONS.name: why} if why else {}


def _why_no_accumulation(steps: Sequence[Watched]) -> dict[str, str]:
    """Why several steps of the script cannot be one."""
    why = ""
    if any(one.steps_by_closure for one in steps):
        why = "the optimizer runs backward itself (a closure)"
    elif not all(one.one_optimizer for one in steps):
        why = "no one optimizer steps all that DDP reduces"
    elif not all(one.clears for one in steps):
        why = "the script clears gradients without zero_grad"
    return {ACCUMULATE_STEPS.name: why} if why else {}


def _why_no_threads(devices: set[str], pinned: str, counts: Sequence[Sequence[int]]) -> dict[str, str]:
    """Why the number of threads is not tuned: it must be open, and the same choice on every rank."""
    if devices != {"cpu"}:
        return {THREADS.name: "the models are not on the CPU"}
    if pinned:
        return {THREADS.name: pinned}
    if not counts[0]:
        return {THREADS.name: "every rank has its share of the cores already"}
    if any(list(other) != list(counts[0]) for other in counts):
        return {THREADS.name: "the nodes differ in cores"}
    return {}


def why_left_out(wrapped: Sequence[Wrapped], is_static: bool) -> dict[str, str]:
    """Knob name → why it cannot be turned in this job."""
    untouchable = next((why for w in wrapped if (why := w.why_untouchable())), "")
    if untouchable:
        return dict.fromkeys(BY_NAME, untouchable)
    left_out = {
        name: f"DDP of torch {torch.__version__} has no such argument"
        for name, knob in BY_NAME.items()
        if knob.ddp_argument and name not in AVAILABLE_ARGUMENTS
    }
    if any(w.script_hook is not None for w in wrapped):
        left_out |= dict.fromkeys(_HOOK_KNOBS, "the script registers a hook of its own")
    elif any(_is_sparse(_module(w)) for w in wrapped):
        left_out |= dict.fromkeys(_HOOK_KNOBS, "the model has sparse gradients")
    if any(w.is_compiled for w in wrapped):
        left_out |= dict.fromkeys(_BUCKET_KNOBS, "the module is compiled, and a new cap would compile it again")
    if any(w.arguments.get("static_graph") for w in wrapped):
        left_out["static_graph"] = "the script sets it already"
    elif not is_static:
        left_out["static_graph"] = "gradients did not become ready once per step in one order"
    return left_out


def _is_sparse(module: nn.Module) -> bool:
    return any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in module.modules())


def _module(wrapped: Wrapped) -> nn.Module:
    ddp = wrapped.ddp
    assert ddp is not None
    module: nn.Module = ddp.module
    return module


def _process_group(wrapped: Wrapped) -> dist.ProcessGroup:
    ddp = wrapped.ddp
    assert ddp is not None
    return ddp.process_group


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return device.type


def _short(value: object) -> str:
    text = repr(value).splitlines()[0]
    return text if len(text) <= 60 else text[:57] + "..."
