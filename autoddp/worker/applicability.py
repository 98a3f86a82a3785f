"""Which knobs a job leaves alone, and why: from what its first steps and its DDP objects have shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autoddp.knobs import BY_NAME
from autoddp.knobs.cuda_graphs import CUDA_GRAPHS
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS, DEFER_REDUCTIONS
from autoddp.knobs.optimize_ddp import OPTIMIZE_DDP
from autoddp.knobs.threads import THREADS
from autoddp.worker.ddp import AVAILABLE_ARGUMENTS, Wrapped

_HOOK_KNOBS = tuple(name for name in BY_NAME if name == "hook" or name.startswith("powersgd_"))
_BUCKET_KNOBS = ("bucket_cap_mb", "bucket_cap_mb_list")
_COMPILED = "the module is compiled, and a new cap would compile it again: --recompile tries a few"
_CUT_FIRST = "the module is compiled: a few caps are tried first, with optimize_ddp"

BY_HAND = "the script reads and changes gradients itself"
JOINS = "the script uses join()"
FINDS_UNUSED = "find_unused_parameters is set, and DDP keeps what a pass has used until it reduces"


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
    why_no_graphs: dict[str, str]
    """Mode of `cuda_graphs` → why it cannot be, "" if it can; empty where nobody asks."""
    changes_gradients: bool = False
    """It changes gradients itself before the optimizer steps."""
    joins: bool = False
    """It trains inside `join()`."""
    compiled: bool = False
    """torch.compile has a model, a part of one, or what is around it."""

    @property
    def micro_steps(self) -> float:
        """Mean reducing forward passes of a step."""
        return sum(self.forwards) / len(self.forwards) if self.forwards else 1.0


def why_left_out(
    wrapped: Sequence[Wrapped], steps: Sequence[Watched], devices: set[str], not_asked: set[str]
) -> dict[str, str]:
    """Knob name → why it cannot be turned in this job; nothing is said of what is `not_asked`.

    `steps` and `devices` are those of all ranks.
    """
    is_compiled = any(one.compiled for one in steps)
    left_out = _why_no_argument(wrapped, all(one.is_static for one in steps))
    if is_compiled:
        why = _COMPILED if OPTIMIZE_DDP.name in not_asked else _CUT_FIRST
        left_out = dict.fromkeys(_BUCKET_KNOBS, why) | left_out
    else:
        left_out[OPTIMIZE_DDP.name] = "torch.compile has none of the models"
    left_out |= why_no_deferral(wrapped, steps) | why_no_accumulation(steps)
    left_out |= _why_no_graphs(wrapped, devices, steps)
    return {name: why for name, why in left_out.items() if name not in not_asked}


def _why_no_argument(wrapped: Sequence[Wrapped], is_static: bool) -> dict[str, str]:
    """Of the knobs of DDP's constructor, and of its hook."""
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
    elif any(_is_sparse(w.ddp.module) for w in wrapped if w.ddp is not None):
        left_out |= dict.fromkeys(_HOOK_KNOBS, "the model has sparse gradients")
    if any(w.arguments.get("static_graph") for w in wrapped):
        left_out["static_graph"] = "the script sets it already"
    elif not is_static:
        left_out["static_graph"] = "gradients did not become ready once per step in one order"
    return left_out


def graph_modes(steps: Sequence[Watched]) -> tuple[str, ...]:
    """What no rank has anything against."""
    return tuple(mode for mode in steps[0].why_no_graphs if not any(one.why_no_graphs.get(mode, "?") for one in steps))


def why_no_deferral(wrapped: Sequence[Wrapped], steps: Sequence[Watched]) -> dict[str, str]:
    """Why no reduction can be put off."""
    counts = {count for one in steps for count in one.forwards}
    why = ""
    if len(wrapped) > 1 or any(one.steps_by_closure for one in steps):
        why = "backward passes are not one step's alone (several DDP models, or a closure)"
    elif any(w.arguments.get("find_unused_parameters") for w in wrapped):
        why = FINDS_UNUSED
    elif any(one.joins for one in steps):
        why = JOINS
    elif any(one.changes_gradients for one in steps):
        why = BY_HAND
    elif len(counts) != 1:
        why = "steps differ in their number of reductions"
    elif max(counts) < 2:
        why = "each step has one reduction"
    return {DEFER_REDUCTIONS.name: why} if why else {}


def why_no_accumulation(steps: Sequence[Watched]) -> dict[str, str]:
    """Why several steps of the script cannot be one."""
    why = ""
    if any(one.steps_by_closure for one in steps):
        why = "the optimizer runs backward itself (a closure)"
    elif any(one.joins for one in steps):
        why = JOINS
    elif not all(one.one_optimizer for one in steps):
        why = "no one optimizer steps all that DDP reduces"
    elif not all(one.clears for one in steps):
        why = "the script clears gradients without zero_grad"
    return {ACCUMULATE_STEPS.name: why} if why else {}


def _why_no_graphs(wrapped: Sequence[Wrapped], devices: set[str], steps: Sequence[Watched]) -> dict[str, str]:
    """Why no CUDA graph can stand for a model, or for its blocks."""
    why = ""
    if "cpu" in devices:
        why = "the models are not on a GPU"
    elif any(w.arguments.get("find_unused_parameters") for w in wrapped):
        why = "find_unused_parameters is set, and a graph uses all"
    elif "gradient_as_bucket_view" not in AVAILABLE_ARGUMENTS:
        why = "it needs gradient_as_bucket_view"
    elif not graph_modes(steps):
        why = next((reason for one in steps for reason in one.why_no_graphs.values() if reason), "nobody asks for it")
    return {CUDA_GRAPHS.name: why} if why else {}


def why_no_threads(devices: set[str], pinned: str, counts: Sequence[Sequence[int]]) -> dict[str, str]:
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


def _is_sparse(module: nn.Module) -> bool:
    return any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in module.modules())
