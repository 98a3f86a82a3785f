"""A capture that other threads do not disturb, and that leaves nothing behind where it fails.

torch's own runs in mode "global": meanwhile a call such as cudaHostAlloc fails in any thread, so a DataLoader that pins
memory in a thread dies of it and takes the capture with it. And where a capture fails, torch (2.4 to 2.13) leaves the
side stream the current one, the memory pool open, and the random generator in the state of a capture.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import torch

_CLOSING = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool", "_cuda_releasePool")
"""Functions of torch._C that close a pool; the second is what torch up to 2.6 calls the first. The public ones open
pools of their own."""
_CLEARING = "_cuda_clearCublasWorkspaces"
"""Function of torch._C that gives back what cuBLAS works in; torch's own captures behind torch.compile call it too."""


@contextlib.contextmanager
def safe_captures(device: torch.device) -> Iterator[None]:
    """`torch.cuda.make_graphed_callables` captures on that device by `SafeCapture` meanwhile."""
    if device.type != "cuda":
        yield
        return
    of_torch = torch.cuda.graph
    clear = _workspaces_are_free()
    if clear:
        _clear_workspaces()
    # A stream of our own: torch keeps one for all captures, on whatever device was current at the first.
    torch.cuda.graph = functools.partial(SafeCapture, stream=torch.cuda.Stream(device))  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.cuda.graph = of_torch  # type: ignore[misc]
        if clear:
            _clear_workspaces()


def _workspaces_are_free() -> bool:
    """Whether no graph is alive, whose kernels may go on working in a workspace that was taken before its capture."""
    gc.collect()  # graphs that nobody can replay any more
    return not any(issubclass(type(thing), torch.cuda.CUDAGraph) for thing in gc.get_objects())


def _clear_workspaces() -> None:
    """Give back what cuBLAS works in; it takes some anew when it needs some.

    It takes 32 MiB on a Hopper GPU for each thread and stream, and keeps them. Without this each capture, which has a
    stream of its own, would leave as much behind, and later work on that stream would write into the graph's memory.
    """
    clear = getattr(torch._C, _CLEARING, None)
    if clear is not None:
        clear()


class SafeCapture(torch.cuda.graph):
    """A `torch.cuda.graph` with a stream given, in mode "thread_local"; what fails in it is undone."""

    def __init__(
        self, cuda_graph: torch.cuda.CUDAGraph, pool: Any = None, *, stream: torch.cuda.Stream, **others: Any
    ) -> None:
        # torch 2.15 gives a mode itself: the usual one.
        others["capture_error_mode"] = "thread_local"
        super().__init__(cuda_graph, pool=pool, stream=stream, **others)
        self._device = stream.device
        self._pools = [] if pool is None else [pool]
        self._generator = torch.cuda.default_generators[self._device.index]
        self._random = self._generator.clone_state()

    def __enter__(self) -> None:
        try:
            super().__enter__()
        except BaseException:
            self._undo()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        except BaseException:
            self._undo()
            if error[0] is None:
                raise
            # Else what went wrong inside says more than that the capture could not be ended.

    def _undo(self) -> None:
        self.stream_ctx.__exit__(None, None, None)
        for pool in self._pools:
            _close(self._device, pool)
        try:
            torch.rand(1, device=self._device)
        except RuntimeError:  # "offset increment outside graph capture": dropout would fail from here on
            self._generator.graphsafe_set_state(self._random)


def _close(device: torch.device, pool: Any) -> None:
    """Close the pool as `capture_end` would have done: else the allocator takes the capture for one that goes on."""
    for name in _CLOSING:
        close = getattr(torch._C, name, None)
        if close is not None:
            with contextlib.suppress(RuntimeError):  # it was never opened
                close(device.index, pool)
