"""torch.compile's own CUDA graphs, for what it has compiled inside the script's DDP models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs.computing import REDUCE_OVERHEAD
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.private import inside_forward
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.effects.torch_compile import ReplaySwitch, TorchCompile
from autoddp.worker.graphs.capture import Sample, no_trace, one_pass, prove, under_autocast
from autoddp.worker.graphs.observed_calls import Seen, why_of_ignored
from autoddp.worker.graphs.signature import copied

_PASSES = 4  # as written to warm up, one recorded, two replayed: into the buffers of the one before


class ReduceOverhead(DdpEvents):
    """Turns torch.compile's own CUDA graphs ("reduce-overhead") on and off, after it has proved that they are right.

    First the script's steps are watched: `watch()`, a `step()` after each of them, `stop_watching()`. Then `prove`
    compares the graphs with the modules. As a handler of DDP's events it tells compilations inside of DDP from others.

    Only what is compiled during a forward pass of DDP's becomes a graph: the script may compile other things too, which
    may keep what a replay overwrites. What the models return is copied, so that the script may keep it.
    """

    def __init__(self, wrapped: Callable[[], Sequence[Wrapped]]) -> None:
        self._wrapped = wrapped
        self._switch = ReplaySwitch()
        self._seen: dict[DDP, Seen] = {}
        self._samples: dict[DDP, Sample] = {}
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.on = False
        self.why_not: dict[str, str] = {}
        """Mode → why it cannot be turned on, after `stop_watching`; "" if it can. Empty if nothing was watched."""

    def watch(self) -> None:
        """See how the models are called from here on."""
        self._seen = {w.ddp: Seen(w.ddp.module, w.ddp.module) for w in self._wrapped() if w.ddp is not None}

    def step(self) -> None:
        """A step that was watched is over."""
        for seen in self._seen.values():
            seen.step()

    def stop_watching(self) -> None:
        """Conclude, if anything was watched."""
        if not self._seen:
            return
        outside = not all(w.is_compiled_inside for w in self._wrapped())
        found = [seen.why_not for seen in self._seen.values() if seen.why_not]
        why = "torch.compile was not given what is inside DDP" if outside else next(iter(found), "")
        why = why or why_of_ignored(self._wrapped())
        self.why_not = {REDUCE_OVERHEAD: why}
        self._samples = {} if why else {ddp: seen.sample() for ddp, seen in self._seen.items()}
        self._seen = {}

    def called(self, ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """DDP is about to call its module."""
        self._arguments = args, kwargs
        self._switch.set(self.on and ddp.gradient_as_bucket_view)

    def returned(self, ddp: DDP, what: Any) -> Any:
        """Return what the script gets: the module's result, or a copy of it where a graph would overwrite it."""
        self._switch.set(False)
        (args, kwargs), self._arguments = self._arguments, ((), {})
        if ddp in self._seen and torch.is_grad_enabled():
            self._seen[ddp].note(args, kwargs, what, order=0)
        return copied(what) if self.on and ddp.gradient_as_bucket_view else what

    def prove(self, compiler: TorchCompile) -> None:
        """Turn it on, by compiling anew, and compare. RuntimeError, and off again, where it gives something else."""
        if not self._samples:
            raise RuntimeError(f"no {REDUCE_OVERHEAD}: {self.why_not.get(REDUCE_OVERHEAD, 'no step was watched')}")
        with no_trace(list(self._samples.values())):
            expected = [self._one_pass(ddp, sample) for ddp, sample in self._samples.items()]
            compiler.begin_again()
            self.on = True
            try:
                for _ in range(_PASSES):
                    found = [self._one_pass(ddp, sample) for ddp, sample in self._samples.items()]
                for sample, one, other in zip(self._samples.values(), found, expected, strict=True):
                    prove(sample, one, other)
            except BaseException:
                self.on = False
                raise

    def _one_pass(self, ddp: DDP, sample: Sample) -> list[torch.Tensor]:
        def call(*tensors: torch.Tensor) -> Any:
            args, kwargs = sample.signature.arguments(tensors)
            with inside_forward(ddp):
                self._switch.set(self.on)
                try:
                    return ddp.module(*args, **kwargs)
                finally:
                    self._switch.set(False)

        # Under just what the script has: torch.compile compiles again for another autocast.
        with under_autocast(sample, torch.is_autocast_cache_enabled()), torch.enable_grad():
            return one_pass(call, sample.inputs(), sample.module)
