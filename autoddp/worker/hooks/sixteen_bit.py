"""Gradients in 16 bits on the wire: half the bytes, and float32 again on arrival.

torch's own bf16 hook refuses gloo by its name alone; gloo can add bfloat16.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from autoddp.worker.hooks.bucket import GradBucket


@dataclass
class SixteenBitState:
    """`dtype` is float16 (11 bits of precision, overflows above 65504) or bfloat16 (8 bits, float32's range)."""

    group: dist.ProcessGroup
    dtype: torch.dtype


def sixteen_bit_hook(state: SixteenBitState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Mean over the ranks, rounded to `state.dtype` once before and once during the sum.

    The division comes first and in full precision: a sum over many ranks would overflow float16 sooner than its mean.
    """
    buffer = bucket.buffer()
    narrow = buffer.div_(state.group.size()).to(state.dtype)
    work = dist.all_reduce(narrow, group=state.group, async_op=True)

    def widen(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        widened: torch.Tensor = buffer.copy_(future.value()[0])
        return widened

    done: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
    return done
