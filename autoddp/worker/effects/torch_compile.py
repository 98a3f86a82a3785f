"""torch.compile in this process: counts compilations, and makes torch.compile compile again after changes.

This is the only file that changes settings of torch.compile. A setting takes effect for what is compiled afterwards.
"""

from __future__ import annotations

import torch


class TorchCompile:
    """Counts compilations from its creation on. Call `begin_again()` after any change that graphs should follow."""

    def __init__(self) -> None:
        self.compilations = 0
        self._cuts_as_written = torch._dynamo.config.optimize_ddp
        torch._dynamo.callback.on_compile_end(self._count)

    def _count(self, *_: object) -> None:
        self.compilations += 1

    def cut(self, at_buckets: bool | None) -> None:
        """Choose whether graphs are cut where DDP's buckets end; None for the script's own choice."""
        torch._dynamo.config.optimize_ddp = self._cuts_as_written if at_buckets is None else at_buckets

    def begin_again(self) -> None:
        """Discard all compiled code: each function is compiled again at its next call."""
        callbacks = torch._dynamo.callback.callback_handler
        kept = list(callbacks.start_callbacks), list(callbacks.end_callbacks)
        torch.compiler.reset()
        # `reset` also removes these callbacks, some of which may be the script's.
        callbacks.start_callbacks[:], callbacks.end_callbacks[:] = kept


class ReplaySwitch:
    """Whether code that is compiled from now on is replayed as CUDA graphs, as under mode="reduce-overhead"."""

    def __init__(self) -> None:
        self._before: bool | None = None

    def set(self, on: bool) -> None:
        """Switch replays on, or back to the script's setting. A call that changes nothing imports nothing."""
        if on == (self._before is not None):
            return
        settings = torch._inductor.config.triton
        now = settings.cudagraphs
        settings.cudagraphs = on or bool(self._before)
        self._before = now if on else None
