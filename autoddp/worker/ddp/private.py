"""Whatever autoddp does to torch's DistributedDataParallel, its reducer and its tensors by names that are not public.

This is the only file that uses private names of them. Each function has one use, so a new version of torch that moves
such a name is followed here alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.held import parts_of

Method = Callable[..., Any]

register_builtin_hook: Callable[..., None] = DDP._register_builtin_comm_hook
set_static_graph: Callable[[DDP], None] = DDP._set_static_graph
"""torch's own methods, as they were before anything of autoddp stood in their place."""

OF_ARGUMENTS = (
    "static_graph",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "batched_grad_copy",
    "bucket_bytes_cap",
    "bucket_bytes_cap_list",
    "bucket_bytes_cap_default",
    "_bucket_config",
)
"""Attributes that DDP's constructor makes of arguments that are knobs; older versions of torch have fewer."""
BROADCASTS = ("broadcast_buffers", "forward_sync_buffers")
"""Attributes that DDP's constructor makes of `broadcast_buffers`, which has two names since torch 2.13."""

FIRST_OF_STATIC = "_static_graph_delay_allreduce_enqueued"
"""An attribute that a DDP object has only with a static graph."""
OF_THE_OLD_REDUCER = ("reducer", "logger", FIRST_OF_STATIC)
"""Attributes to delete before DDP's constructor runs again. The first two keep the old reducer alive, whose destructor
removes its autograd hooks from the parameters. The third is set only for a static graph, and would stay afterwards."""
_BY_HAND = "require_manual_backward_finalization"
"""A property of DDP objects since torch 2.15, which a new reducer has to be told of."""
_MODULE_STATE = frozenset(nn.Module().__dict__)
CARRIED_OVER = _MODULE_STATE | {
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "_join_config",
    "_ddp_sink_clone",
    # An object without buffers never broadcasts those that the script has added to the module since.
    "modules_buffers",
    "named_module_buffers",
}
"""Attributes that keep their values when DDP's constructor runs again: they are the script's, not the constructor's."""
_FIRST_SYNC = ("_verify_param_shape_across_processes", "_sync_module_states")
"""Functions that DDP's constructor calls to compare the parameters of all ranks and to copy those of rank 0."""


class _Warnings:
    """Stands for the module `warnings` in DDP's file, so that a warning names the script's line, as without autoddp.

    DDP's constructor asks for the line of its caller. Under `Patch` that would be a line of autoddp's.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(self, message: Any, category: Any = None, stacklevel: int = 1, **more: Any) -> None:
        """Warn as `warnings.warn` does; frames of autoddp do not count as levels."""
        frame, level = sys._getframe(1), 2
        while stacklevel > 1 and frame.f_back:
            frame, level = frame.f_back, level + 1
            stacklevel -= not str(frame.f_globals.get("__name__")).startswith("autoddp.")
        warnings.warn(message, category, stacklevel=level, **more)


def warn_at_the_scripts_line() -> None:
    """Let DDP's warnings name the line of the script that calls DDP, also where a wrapper of ours stands between."""
    vars(torch.nn.parallel.distributed)["warnings"] = _Warnings()


def replace_methods(register_builtin: Method, static_graph: Method) -> None:
    """Put these in the place of `register_builtin_hook` and `set_static_graph`, for every object."""
    DDP._register_builtin_comm_hook = register_builtin  # type: ignore[method-assign]
    DDP._set_static_graph = static_graph  # type: ignore[method-assign]


def wrap_forward(before: Callable[[Method], Method], after: Callable[[Method], Method]) -> None:
    """Wrap what DDP does before the module's forward, and what it does after it. Wrappers may be wrapped again."""
    DDP._pre_forward = _wrapped_by(before, DDP._pre_forward)  # type: ignore[method-assign]
    DDP._post_forward = _wrapped_by(after, DDP._post_forward)  # type: ignore[method-assign]


def ask_before_preparing(may_reduce: Callable[[Any], bool]) -> None:
    """Prepare a reducer for a backward pass only where `may_reduce(reducer)`; else that pass reduces nothing.

    DDP prepares it after each forward pass that reduces. A script may do that itself, whatever DDP is told.
    """
    prepare: Method = dist.Reducer.prepare_for_backward  # type: ignore[attr-defined]

    def prepare_for_backward(reducer: Any, *outputs: Any, **named: Any) -> None:
        if may_reduce(reducer):
            prepare(reducer, *outputs, **named)

    disabled = torch.compiler.disable(prepare_for_backward)
    dist.Reducer.prepare_for_backward = disabled  # type: ignore[attr-defined, method-assign]


def _wrapped_by(wrap: Callable[[Method], Method], method: Method) -> Method:
    return skipped_by_dynamo(functools.wraps(method)(wrap(method)), with_all_inside=True)


def skipped_by_dynamo(function: Callable[..., Any], with_all_inside: bool = False) -> Callable[..., Any]:
    """`function`, which torch.compile skips. It skips DDP's file, and has to skip our wrappers of DDP's methods too.

    `with_all_inside`: it also skips what the function calls. Else it would compile each handler of DDP's events, which
    takes seconds, prints warnings, and runs functions with a cache again.

    `functools.wraps` copies what an earlier wrapper of the method has, also the attribute by which torch 2.7 and 2.8
    find the function to skip: they would give back that wrapper's, and leave this one out.
    """
    vars(function).pop("_torchdynamo_orig_callable", None)
    disable = cast("Callable[..., Any]", torch.compiler.disable)
    return cast("Callable[..., Any]", disable(function, recursive=with_all_inside))


@contextlib.contextmanager
def without_first_sync() -> Iterator[None]:
    """Keep DDP's constructor from comparing and copying parameters, where it has no argument for that (torch 2.6)."""
    of_torch = vars(torch.nn.parallel.distributed)
    before = {name: of_torch[name] for name in _FIRST_SYNC}
    of_torch.update(dict.fromkeys(before, lambda *_, **__: None))
    try:
        yield
    finally:
        of_torch.update(before)


def copy_state_of_rank_0(ddp: DDP) -> None:
    """Copy what DDP synchronises from rank 0 to all ranks, as its constructor does."""
    size, ignored = ddp.broadcast_bucket_size, ddp.parameters_to_ignore
    sync = dist.utils._sync_module_states
    sync(ddp.module, ddp.process_group, size, 0, ignored, broadcast_buffers=ddp.broadcast_buffers)


def module_parameters(ddp: DDP) -> Iterable[nn.Parameter]:
    """The parameters of the module that DDP was not told to ignore, in its order, frozen ones too."""
    found: Iterable[nn.Parameter] = ddp._module_parameters
    return found


def ignored_names(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers of `module` that the script tells DDP to ignore."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def device_of(ddp: DDP) -> torch.device:
    """The device of all its parameters, or of the first of them."""
    device: torch.device = next(iter(module_parameters(ddp))).device
    return device


def has_hook(ddp: DDP) -> bool:
    """Whether the object's reducer has a communication hook in Python."""
    return bool(getattr(ddp, "_comm_hooks", None))


def hooks_of(ddp: DDP) -> list[tuple[Callable[..., Any], Any]]:
    """The object's communication hooks in Python, each with its state: none or one. The list is not a copy."""
    found: list[tuple[Callable[..., Any], Any]] = ddp._comm_hooks
    return found


def compiles_calls(module: nn.Module) -> bool:
    """Whether torch.compile compiles calls of `module`, or of a part of it."""
    return any(isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl for m in module.modules())


def is_compiled_itself(ddp: DDP) -> bool:
    """Whether the script has called `ddp.compile()`."""
    return bool(ddp._compiled_call_impl)


def uses_python_reducer(ddp: DDP) -> bool:
    """Whether torch.compile's python_reducer reduces the object's gradients."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def will_use_python_reducer() -> bool:
    """Whether it will reduce the gradients of an object that is built now."""
    return bool(torch._dynamo.config.optimize_ddp == "python_reducer")


def steps_inside_backward(module: nn.Module) -> bool:
    """Whether an optimizer steps as soon as a gradient of `module` is ready."""
    return any(hasattr(p, "_in_backward_optimizers") for _, p in module.named_parameters())


def root_of(mesh: Any) -> Any:
    """The mesh from which `mesh` was cut, or `mesh` itself; found in the same way as in DDP's constructor."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    return dist.device_mesh._mesh_resources.get_root_mesh(mesh)  # torch before 2.9


def is_joining(ddp: DDP) -> bool:
    """Whether the script uses `ddp` inside `join()`: then some ranks may have ended and only shadow its reductions."""
    return bool(ddp._join_config.enable)


def divides_by_those_left(ddp: DDP) -> bool:
    """Whether, inside `join()`, DDP divides gradients by the number of ranks that still have inputs.

    Only DDP itself knows that number: a communication hook divides by all ranks.
    """
    return is_joining(ddp) and not getattr(ddp, "_divide_by_initial_world_size", True)


def has_buffer_hook(ddp: DDP) -> bool:
    """Whether the script has registered a hook that DDP calls in place of its broadcast of buffers."""
    return hasattr(ddp, "buffer_hook")


def must_reduce(ddp: DDP) -> bool:
    """Whether the next backward pass must reduce: `finalize_backward` raises if nothing was reduced."""
    return learns_order(ddp) or finalizes_by_hand(ddp)


def learns_order(ddp: DDP) -> bool:
    """Whether the next backward pass is the first with a static graph, in which DDP learns the order of gradients."""
    return bool(ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued)


def finalizes_by_hand(ddp: DDP) -> bool:
    """Whether the script itself waits for the reductions of each backward pass, by `finalize_backward` (torch 2.15)."""
    return bool(getattr(ddp, _BY_HAND, False))


def finalize_by_hand(ddp: DDP) -> None:
    """Let a reducer that was made just now wait for the script's `finalize_backward`."""
    setattr(ddp, _BY_HAND, True)


def after_finalization(ddp: DDP, call: Callable[[], object]) -> None:
    """Call `call` once, when the script's next `finalize_backward` has ended: only then are the gradients reduced."""
    of_torch: Method = cast("Any", type(ddp)).finalize_backward
    this = weakref.ref(ddp)  # an object that held itself would be freed later

    def finalizes() -> None:
        ddp = this()
        assert ddp is not None  # its method is being called
        ddp.__dict__.pop("finalize_backward", None)
        of_torch(ddp)
        call()

    ddp.__dict__["finalize_backward"] = finalizes


def has_final_buckets(ddp: DDP) -> bool:
    """Whether DDP has made its buckets for the second time. It does that once, before a forward pass, or never."""
    return bool(getattr(ddp, "_has_rebuilt_buckets", False))


def ranks_of(ddp: DDP) -> list[int]:
    """The ranks of the object's process group, counted in the whole job.

    Of a group that a script has made by its class alone torch knows none: then they are counted in the group itself.
    """
    try:
        return list(dist.get_process_group_ranks(ddp.process_group))
    except KeyError:
        return list(range(ddp.process_group.size()))


_START = "autoddp/start"
_starts: weakref.WeakKeyDictionary[DDP, str] = weakref.WeakKeyDictionary()
"""DDP object → the name of the start in which it was built, the same on all ranks of its group."""


def tell_start(arguments: Mapping[str, Any]) -> None:
    """Put the name of this start into the store of the group that DDP is about to be built with; on its rank 0 alone.

    torchrun starts failed ranks again with the store that they had, with all that the start before has put into it.
    DDP's constructor ends on no rank before rank 0 has begun to compare the parameters there, so others find the name.
    """
    mesh, group = arguments.get("device_mesh"), arguments.get("process_group")
    if mesh is not None:
        group = mesh.get_group(mesh_dim=0) if not group and mesh.ndim == 1 else None  # else torch raises its own error
    elif not group:
        group = dist.group.WORLD
    store = None if group is None else _store_of(group)
    if group is not None and store is not None and group.rank() == 0:
        with contextlib.suppress(RuntimeError):  # a store that a script has made for a test may keep nothing
            store.set(_key_of_start(group), _name_of_start())
            store.get(_key_of_start(group))  # the store has it, when this is answered


def hear_start(ddp: DDP, arguments: Mapping[str, Any]) -> None:
    """Remember the name of this start for an object that was built with these arguments, if its ranks have compared."""
    store = _store_of(ddp.process_group)
    if store is not None and arguments.get("init_sync", True):
        with contextlib.suppress(RuntimeError):
            key = _key_of_start(ddp.process_group)
            if store.check([key]):
                _starts[ddp] = store.get(key).decode()


def _key_of_start(group: Any) -> str:
    """The key for this group alone: some versions of torch give all groups of one `split_group` the same store."""
    return f"{_START}/{dist.get_global_rank(group, 0)}"


@functools.cache
def _name_of_start() -> str:
    return os.urandom(8).hex()


def store_of(ddp: DDP) -> Any:
    """The store of the object's process group, without keys of an earlier start; None if torch does not give it."""
    store = _store_of(ddp.process_group)
    return store if store is None or ddp not in _starts else dist.distributed_c10d.PrefixStore(_starts[ddp], store)


def _store_of(group: Any) -> Any:
    try:
        return dist.distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError):
        return None


def time_limit_of(ddp: DDP) -> float:
    """Seconds that a collective of the object's process group may take, or those of its store where they are more.

    A group may have more than its store, by an argument of `new_group` or by a store that the script has made.
    """
    try:
        of_group: timedelta = cast("Any", ddp.process_group)._get_backend(device_of(ddp)).options._timeout
    except (AttributeError, RuntimeError):  # a backend without such options
        of_group = timedelta()
    of_store: timedelta = store_of(ddp).timeout
    return max(of_group, of_store).total_seconds()


def backend_of(ddp: DDP) -> str:
    """The backend that reduces the object's gradients: "nccl", "gloo", and so on; "nccl" for each that is of NCCL.

    A group may have one backend for each type of device, as after `init_process_group()` without a backend. There
    `get_backend` returns none of these names but "undefined", or "cpu:gloo,cuda:nccl" as the script has written it.
    NCCL's are also called "nccl2", "nccl-lazy" and "nccl-legacy" since torch 2.15.
    """
    by_device = dict(part.split(":") for part in dist.get_backend_config(ddp.process_group).split(",") if ":" in part)
    found = str(by_device.get(device_of(ddp).type, dist.get_backend(ddp.process_group)))
    return "nccl" if found.startswith("nccl") else found


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors in the output of a module, where DDP itself looks for them, as far as they are there already.

    Only with `find_unused_parameters` does DDP look. Its own function asks the script's classes, which may compute what
    they are asked for or lack a field that the script sets later, and it never ends where an output holds itself.
    """
    of_torch = torch.nn.parallel.distributed
    found: list[torch.Tensor] = []
    parts, seen = [output], set[int]()
    while parts:
        one = parts.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif of_torch.RPC_AVAILABLE and isinstance(one, of_torch.RRef):  # type: ignore[attr-defined]
            parts += [one.local_value()] if one.is_owner() else []
        elif id(one) not in seen:
            seen.add(id(one))
            parts += parts_of(one)
    return found


def tensors_of_static_graph(output: Any) -> list[torch.Tensor]:
    """The tensors in the output of a module from which DDP learns a static graph.

    These are others than those of `tensors_in`: torch's pytrees do not see into dataclasses, nor into classes that a
    script has derived from dict, list or tuple.
    """
    leaves = torch.nn.parallel.distributed._tree_flatten_with_rref(output)[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def inside_forward(ddp: DDP) -> contextlib.AbstractContextManager[None]:
    """A context as inside the object's forward pass: torch.compile cuts graphs in it at this object's buckets."""
    inside: contextlib.AbstractContextManager[None] = ddp._inside_ddp_forward()
    return inside


def hooks_inside(module: nn.Module) -> list[dict[int, Any]]:
    """The hook dictionaries of all modules inside `module`, without its own; these are no copies."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(inner, name) for inner in module.modules() if inner is not module for name in names]


def version_of(tensor: torch.Tensor) -> int:
    """How often `tensor` was written to in place. torch has no public name for it."""
    return int(tensor._version)


def same_version_again(tensor: torch.Tensor) -> Callable[[], object]:
    """A function that puts the version of `tensor` back to what it is now, whatever is written to it before the call.

    What an autograd graph holds must have the version with which it was saved. torch has no public name for it.
    """
    version = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    return lambda: version.__exit__(None, None, None)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which `tensor` is a part or another shape, as a gradient is of its bucket; None for any other.

    torch has no public name for it.
    """
    return tensor._base


def uses_of(storage: torch.UntypedStorage) -> int:
    """How many tensors and objects of Python hold this storage: `storage` itself is one. torch has no other name."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def holders_of(tensor: torch.Tensor) -> int:
    """How many hold this tensor in C++, all references of Python counting as one; 0 where torch does not tell.

    An autograd graph holds what it needs for its backward pass in this way alone, and so does DLPack.
    """
    count = getattr(tensor, "_use_count", None)
    return 0 if count is None else int(count())


def queue_callback(call: Callable[[], None]) -> None:
    """Call `call` when the current backward pass has computed all gradients, after what is queued already."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
