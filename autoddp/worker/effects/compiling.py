"""The knobs of torch.compile, which are applied to the script's compiled models by compiling them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.knobs.computing import CUDA_GRAPHS, OPTIMIZE_DDP, REDUCE_OVERHEAD
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.effects.base import Effect
from autoddp.worker.effects.torch_compile import TorchCompile
from autoddp.worker.graphs.reduce_overhead import ReduceOverhead


class Compiling(Effect):
    """Compiles the script's models again when a configuration changes how.

    In a trial, where models may be compiled already, `begin` must be called before the first `apply`. `apply` must be
    called after DDP's buckets were changed.
    """

    def __init__(self, wrapped: Callable[[], Sequence[Wrapped]]) -> None:
        self._wrapped = wrapped
        self._compiler: TorchCompile | None = None
        self._begun = False
        self._now = _asked(AS_WRITTEN)
        self.replays = ReduceOverhead(wrapped)

    @property
    def concerns(self) -> bool:
        """Whether any of the models is compiled."""
        return any(w.is_compiled for w in self._wrapped())

    def begin(self) -> None:
        """Count compilations from now on, if any model is compiled."""
        if self.concerns:
            self._compiler, self._begun = TorchCompile(), True

    @property
    def compilations(self) -> int:
        """Number of compilations in this process since `begin`."""
        return self._compiler.compilations if self._compiler else 0

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`. Compiled models are compiled again. RuntimeError if replayed graphs give other results."""
        asked = _asked(configuration)
        if asked == self._now:
            return
        _, at_buckets, replayed = asked
        self._now, self.replays.on = asked, False
        if at_buckets is not None and self._compiler is None:
            self._compiler = TorchCompile()
        if self._compiler is not None:
            self._compiler.cut(at_buckets)
        if not self._begun or self._compiler is None:  # no model is compiled yet, so there is nothing to compare
            self.replays.on = replayed
            return
        self._compiler.begin_again()
        if replayed:
            self.replays.prove(self._compiler)


def _asked(configuration: Configuration) -> tuple[object, bool | None, bool]:
    replayed = CUDA_GRAPHS.of(configuration) == REDUCE_OVERHEAD
    return BUCKET_CAP_MB.of(configuration), OPTIMIZE_DDP.of(configuration), replayed
