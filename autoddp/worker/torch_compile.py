"""torch.compile in this process: what it compiles is counted, and compiled anew where its graphs are to be others.

The single file that touches its settings. Those that are read while it compiles hold for what it compiles then.
"""

from __future__ import annotations

import torch


class TorchCompile:
    """`TorchCompile()` counts from here on; `begin_again()` after any change that its graphs should show."""

    def __init__(self) -> None:
        self.compilations = 0
        self._cuts_as_written = torch._dynamo.config.optimize_ddp
        torch._dynamo.callback.on_compile_end(self._count)

    def _count(self, *_: object) -> None:
        self.compilations += 1

    def cut(self, at_buckets: bool | None) -> None:
        """Cut graphs where DDP's buckets end, or not; None: as the script has it."""
        torch._dynamo.config.optimize_ddp = self._cuts_as_written if at_buckets is None else at_buckets

    def begin_again(self) -> None:
        """Forget all that was compiled: each function is compiled anew at its next call."""
        callbacks = torch._dynamo.callback.callback_handler
        kept = list(callbacks.start_callbacks), list(callbacks.end_callbacks)
        torch.compiler.reset()
        # It forgets these too, the script's among them.
        callbacks.start_callbacks[:], callbacks.end_callbacks[:] = kept


class ReplaySwitch:
    """Whether what is compiled from here on is replayed as CUDA graphs: all that mode="reduce-overhead" says."""

    def __init__(self) -> None:
        self._before: bool | None = None

    def turn(self, on: bool) -> None:
        """On, or back to what it was before that; turning twice changes nothing, nor does it import anything."""
        if on == (self._before is not None):
            return
        settings = torch._inductor.config.triton
        now = settings.cudagraphs
        settings.cudagraphs = on or bool(self._before)
        self._before = now if on else None
