"""The script's compiled models: what a configuration asks of torch.compile, brought into effect by compiling anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.knobs.computing import CUDA_GRAPHS, OPTIMIZE_DDP, REDUCE_OVERHEAD
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB
from autoddp.worker.ddp import Wrapped
from autoddp.worker.effect import Effect
from autoddp.worker.graphs.reduce_overhead import ReduceOverhead
from autoddp.worker.torch_compile import TorchCompile


class Compiling(Effect):
    """`begin()` where models may be compiled already, before the first `apply`; `apply` after DDP has its buckets."""

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
        """Count what is compiled from here on, if there is anything to compile."""
        if self.concerns:
            self._compiler, self._begun = TorchCompile(), True

    @property
    def compilations(self) -> int:
        """How often torch.compile was at work since `begin`, in this process."""
        return self._compiler.compilations if self._compiler else 0

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`. Compile anew what is compiled; RuntimeError where replayed graphs give something else."""
        asked = _asked(configuration)
        if asked == self._now:
            return
        _, at_buckets, replayed = asked
        self._now, self.replays.on = asked, False
        if at_buckets is not None and self._compiler is None:
            self._compiler = TorchCompile()
        if self._compiler is not None:
            self._compiler.cut(at_buckets)
        if self._begun:
            self._compile_anew(replayed)
        else:  # nothing is compiled yet, and nothing can be compared
            self.replays.on = replayed

    def _compile_anew(self, replayed: bool) -> None:
        assert self._compiler is not None
        self._compiler.begin_again()
        if replayed:
            self.replays.prove(self._compiler)


def _asked(configuration: Configuration) -> tuple[object, bool | None, bool]:
    replayed = CUDA_GRAPHS.of(configuration) == REDUCE_OVERHEAD
    return BUCKET_CAP_MB.of(configuration), OPTIMIZE_DDP.of(configuration), replayed
