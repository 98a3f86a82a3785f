"""A hook by itself: it computes as in a step of DDP, on a bucket of its own, and sends nothing.

run = by_itself(Configuration({"hook": "powersgd", "powersgd_rank": 2}))
run(one_matrix(1024, device)).wait()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoddp.knobs import Configuration
from autoddp.worker.hooks import hook_for
from autoddp.worker.process.device import future_on


@dataclass(frozen=True)
class FullBucket:
    """A bucket that holds all gradients. It has those methods of torch's GradBucket that the hooks use."""

    flat: torch.Tensor
    views: list[torch.Tensor]

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], like: torch.Tensor) -> FullBucket:
        """Gradients of these shapes, in the type and on the device of `like`.

        They are random numbers of the usual size, because zeros and tiny numbers take another time to compute with.
        """
        sizes = [torch.Size(shape).numel() for shape in shapes]
        generator = torch.Generator().manual_seed(0)
        flat = torch.randn(sum(sizes), generator=generator, device="cpu").to(like)
        return cls(flat, [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)])

    def index(self) -> int:
        """The number of the bucket in its step."""
        return 0

    def is_last(self) -> bool:
        """Whether this is the step's last bucket, at which PowerSGD drains its pipeline."""
        return True

    def buffer(self) -> torch.Tensor:
        """The flat bucket."""
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, as views of the bucket."""
        return self.views

    def parameters(self) -> list[torch.Tensor]:
        """The parameters; the hooks use only their identity."""
        return self.views


def one_matrix(side: int, device: torch.device) -> FullBucket:
    """A bucket with one square matrix of float32."""
    return FullBucket.of([(side, side)], torch.empty(0, device=device))


def by_itself(configuration: Configuration) -> Callable[[FullBucket], torch.futures.Future[torch.Tensor]]:
    """The hook of the configuration, which must have one, as a rank without others runs it. It compresses at once."""
    group: Any = _Group()
    made = hook_for(configuration, group, start_step=0)
    assert made is not None, configuration
    state, hook = made
    state.all_reduce = lambda tensor, _group: _Done(tensor)
    return lambda bucket: hook(state, bucket)  # type: ignore[arg-type]  # it has all the methods that hooks use


class _Group:
    """This rank and no other."""

    def size(self) -> int:
        """The number that a hook divides by."""
        return 1


class _Done:
    """A finished all-reduce, which has left everything as it was."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._future: torch.futures.Future[list[torch.Tensor]] = future_on(tensor.device)
        self._future.set_result([tensor])

    def wait(self) -> None:
        """Return at once: nothing is under way."""

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A finished future of the tensor that was to be sent, unchanged."""
        return self._future
