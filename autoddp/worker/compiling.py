"""The script's compiled models: what a configuration asks of torch.compile, brought into effect by compiling anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.knobs.buckets import BUCKET_CAP_MB
from autoddp.knobs.cuda_graphs import CUDA_GRAPHS, REDUCE_OVERHEAD
from autoddp.knobs.optimize_ddp import OPTIMIZE_DDP
from autoddp.worker.ddp import Wrapped
from autoddp.worker.graphs.reduce_overhead import ReduceOverhead
from autoddp.worker.torch_compile import TorchCompile


class Compiling:
    """`begin()` once the models are compiled, then `turn` at step boundaries, after DDP has its new buckets."""

    def __init__(self, wrapped: Callable[[], Sequence[Wrapped]]) -> None:
        self._wrapped = wrapped
        self._compiler: TorchCompile | None = None
        self._now = _asked(AS_WRITTEN)
        self.replays = ReduceOverhead(wrapped)

    @property
    def concerns(self) -> bool:
        """Whether any of the models is compiled."""
        return any(w.is_compiled for w in self._wrapped())

    def begin(self) -> None:
        """Count what is compiled from here on, if there is anything to compile."""
        if self.concerns:
            self._compiler = TorchCompile()

    @property
    def compilations(self) -> int:
        """How often torch.compile was at work since `begin`, in this process."""
        return self._compiler.compilations if self._compiler else 0

    def turn(self, configuration: Configuration) -> None:
        """Compile anew where the graphs are to be others. RuntimeError where replayed ones give something else."""
        asked = _asked(configuration)
        if self._compiler is None or asked == self._now:
            return
        _, at_buckets, replayed = asked
        self._now, self.replays.on = asked, False
        self._compiler.cut(at_buckets)
        self._compiler.begin_again()
        if replayed:
            self.replays.prove(self._compiler)


def _asked(configuration: Configuration) -> tuple[object, bool | None, bool]:
    at_buckets = configuration.get(OPTIMIZE_DDP.name)
    return (
        configuration.get(BUCKET_CAP_MB.name),
        None if at_buckets is None else bool(at_buckets),
        configuration.get(CUDA_GRAPHS.name) == REDUCE_OVERHEAD,
    )
