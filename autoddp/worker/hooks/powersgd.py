"""PowerSGD (Vogels et al., 2019): each gradient matrix is sent as two thin factors, and the error is fed back.

torch's own hook issues its second collective from a future's callback. The order of callbacks differs between ranks,
and with more than one bucket in flight gloo aborts the process. Here every collective is issued from the hook itself,
in bucket order, as a pipeline: the hook call for bucket i+1 issues that bucket's first collective and then finishes the
first half of bucket i; the call for the last bucket drains the pipeline. So the order is the same on all ranks, for any
number of buckets and any backend, and the first collectives still overlap with backward.

The thin factors are kept as rows, [count, rank, …], and are the left operand of every product: with MKL a thin factor
on the right is 7 to 30 times slower, and the products would cost more than a backward pass.

With `batched` the whole bucket is one nearly square matrix, whatever gradients it contains.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autoddp.knobs import Configuration
from autoddp.knobs.hook import (
    DEFAULT_START_STEP,
    POWERSGD_BATCHED,
    POWERSGD_FACTORS,
    POWERSGD_RANK,
    POWERSGD_START_STEP,
)
from autoddp.worker.hooks.all_reduce import AllReduce, all_reduce, await_on_the_stream
from autoddp.worker.hooks.bucket import GradBucket, gradients_in
from autoddp.worker.hooks.exact import exact_mean
from autoddp.worker.process.device import beside_the_current_stream, future_on, is_gpu

_ROWS_OF_CHOLESKY = 4
_SEED = 20191  # for the first random factors: any number that is the same on all ranks


@dataclass
class _Matrices:
    """The gradients of one bucket that have the same matrix shape, stacked."""

    views: list[torch.Tensor]
    shape: tuple[int, int]
    stacked: torch.Tensor
    """[count, rows, columns]: gradients plus the error fed back. What compression leaves out is the next error."""
    q: torch.Tensor
    """[count, rank, columns]."""


@dataclass
class _Flight:
    """A bucket whose factors are being reduced."""

    bucket: torch.Tensor
    matrices: list[_Matrices]
    plain: list[torch.Tensor]
    """Gradients that are too small or too thin to compress: they are sent whole, together with the first factors."""
    wire: torch.Tensor
    work: dist.Work
    future: torch.futures.Future[torch.Tensor]
    index: int
    p: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Memory:
    """What the hook keeps of a model from step to step. It takes as much memory as the gradients, for the error."""

    step: int = 0
    """Number of reductions so far."""
    errors: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Bucket index → what compression has left out so far, one stack for each matrix shape."""
    factors: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Bucket index → the orthonormal q of the last step, as a warm start of the power iteration."""
    owners: dict[int, list[int]] = field(default_factory=dict)
    """Bucket index → the `id` of each parameter to which errors and factors belong."""


@dataclass
class PowerSGDState:
    """State of the hook of one DDP object."""

    group: dist.ProcessGroup
    rank: int
    start_step: int
    """Number of reductions that are exact before compression starts."""
    batched: bool = False
    """Whether each bucket is compressed as one matrix, instead of each gradient."""
    wire_type: torch.dtype | None = None
    """The type in which the factors, and the plain gradients, are sent; their own type if None. The error that is fed
    back makes up for the rounding of the factors."""
    memory: Memory = field(default_factory=Memory)
    resumes: bool = False
    """Whether this object's first reduction is still to come, in a training that has begun with another object. It is
    exact: DDP makes other buckets after it, mostly those to which the memory belongs."""
    flights: list[_Flight] = field(default_factory=list)
    unnumbered: bool = False
    """Whether DDP currently calls the hook without distinct bucket numbers."""
    all_reduce: AllReduce = all_reduce

    def go_on_with(self, memory: Memory) -> None:
        """Go on where another DDP object of the same model has ended."""
        self.memory, self.resumes = memory, memory.step > 0


def powersgd(
    configuration: Configuration, group: dist.ProcessGroup, start: int | None
) -> tuple[PowerSGDState, Callable[[PowerSGDState, GradBucket], torch.futures.Future[torch.Tensor]]]:
    """The hook "powersgd" with a state for the knobs of `configuration`; `start` overrides its start step."""
    begins = start if start is not None else POWERSGD_START_STEP.of(configuration)
    state = PowerSGDState(
        group,
        rank=POWERSGD_RANK.of(configuration) or 1,
        start_step=DEFAULT_START_STEP if begins is None else begins,
        batched=POWERSGD_BATCHED.of(configuration) or False,
        wire_type=torch.bfloat16 if POWERSGD_FACTORS.of(configuration) == "bf16" else None,
    )
    return state, powersgd_hook


def powersgd_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: the mean over the ranks, projected on `state.rank` directions for each matrix."""
    compress = state.memory.step >= state.start_step and not state.resumes
    if bucket.is_last():
        state.memory.step += 1
        state.resumes = False
    if not compress:
        return exact_mean(state.group, bucket)
    with _beside_the_backward_pass(bucket.buffer().device):
        return _compressed(state, bucket)


@contextlib.contextmanager
def _beside_the_backward_pass(device: torch.device) -> Iterator[None]:
    """Run on a separate CUDA stream and without autocast.

    On the stream of the backward pass, each wait for a collective would delay the rest of that pass. A script may have
    autocast on around its backward pass, which would compute the factors in lower precision.
    """
    with torch.autocast(device.type, enabled=False), beside_the_current_stream(device):
        yield


def _compressed(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    _look_at_the_number(state, bucket.index())
    _take_off(state, bucket)
    flight = state.flights[-1]
    if len(state.flights) > 1:
        _second_half(state, state.flights[-2])
    if bucket.is_last() or state.unnumbered:
        _second_half(state, flight)
        _land(state)
    return flight.future


def _look_at_the_number(state: PowerSGDState, index: int) -> None:
    """Notice whether DDP numbers its buckets.

    In the first pass over a static graph with a list of bucket sizes, DDP gives every bucket the index 0 and calls none
    the last (torch 2.13). The end of the pass is then unknown, so each call drains the pipeline until numbers return.
    """
    if any(flight.index >= index for flight in state.flights):
        state.unnumbered = True
    elif index > 0:
        state.unnumbered = False


def _take_off(state: PowerSGDState, bucket: GradBucket) -> None:
    """Issue the first collective of a bucket: every pᵀ = qᵀ Mᵀ, and the plain gradients."""
    index, buffer = bucket.index(), bucket.buffer()
    _drop_what_belongs_to_others(state.memory, index, [id(parameter) for parameter in bucket.parameters()])
    matrices, plain = _sort(state, index, _as_one_matrix(buffer) if state.batched else gradients_in(bucket))
    wire = _to_send(state, [torch.bmm(m.q, m.stacked.transpose(1, 2)) for m in matrices] + plain)
    work = state.all_reduce(wire, state.group)
    state.flights.append(_Flight(buffer, matrices, plain, wire, work, future_on(buffer.device), index))


def _second_half(state: PowerSGDState, flight: _Flight) -> None:
    """Receive p, orthogonalise it, and issue the second collective: every qᵀ = pᵀ M."""
    received, offset = _received(flight), 0
    for m in flight.matrices:
        p, offset = _cut(received, offset, (len(m.views), m.q.shape[1], m.shape[0]))
        flight.p.append(_orthogonal(p))
    for gradient in flight.plain:
        whole, offset = _cut(received, offset, tuple(gradient.shape))
        gradient.copy_(whole)
    if not flight.matrices:
        return
    qs = [torch.bmm(p, m.stacked) for m, p in zip(flight.matrices, flight.p, strict=True)]
    flight.wire = _to_send(state, qs)
    flight.work = state.all_reduce(flight.wire, state.group)


def _land(state: PowerSGDState) -> None:
    """Receive every q, write p qᵀ into the buckets, keep the error, and give the buckets back to DDP."""
    flights, state.flights = state.flights, []
    for flight in flights:
        received = _received(flight) if flight.matrices else flight.wire
        offset, errors, factors = 0, [], []
        for m, p in zip(flight.matrices, flight.p, strict=True):
            q, offset = _cut(received, offset, tuple(m.q.shape))
            for view, matrix, rows, columns in zip(m.views, m.stacked, p, q, strict=True):
                _write_product(view, rows, columns)
                matrix.sub_(view.reshape(m.shape))
            # AMP makes gradients overflow to find its scale: such values must not be fed back for ever.
            errors.append(m.stacked.nan_to_num_(0.0, 0.0, 0.0))
            factors.append(_orthogonal(_usable(q, m.q)))
        state.memory.errors[flight.index], state.memory.factors[flight.index] = errors, factors
        flight.future.set_result(flight.bucket)


def _to_send(state: PowerSGDState, parts: list[torch.Tensor]) -> torch.Tensor:
    """This rank's share of the mean, flat. It is divided before it is rounded, to keep the sum in the type's range."""
    share = torch.cat([part.reshape(-1) for part in parts]).div_(state.group.size())
    return share if state.wire_type is None else share.to(state.wire_type)


def _received(flight: _Flight) -> torch.Tensor:
    """Wait for the collective; its result in the bucket's type."""
    await_on_the_stream(flight.work)
    return flight.wire.to(flight.bucket.dtype)


def _as_one_matrix(bucket: torch.Tensor) -> list[torch.Tensor]:
    """Two views of a flat bucket: a nearly square matrix, and the rest, which is shorter than a row."""
    rows = max(1, math.isqrt(bucket.numel()))
    columns = bucket.numel() // rows
    return [bucket[: rows * columns].view(rows, columns), bucket[rows * columns :]]


def _write_product(view: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Write rowsᵀ columns to `view`; without a temporary copy if the gradient is contiguous."""
    if view.is_contiguous():
        torch.mm(rows.t(), columns, out=view.view(rows.shape[1], columns.shape[1]))
    else:
        view.copy_(torch.mm(rows.t(), columns).view(view.shape))


def _usable(q: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """A copy of q in which rows that are zero or not finite are replaced by those of `before`.

    The power iteration could never leave such rows again.
    """
    norm = q.norm(dim=2, keepdim=True)
    return torch.where((norm > 0) & (norm < float("inf")), q, before)


def _drop_what_belongs_to_others(memory: Memory, index: int, owners: list[int]) -> None:
    """Drop the error and the factors of a bucket if its parameters have changed, as when DDP rebuilds its buckets."""
    if memory.owners.get(index) != owners:
        memory.errors.pop(index, None)
        memory.factors.pop(index, None)
        memory.owners[index] = owners


def _sort(
    state: PowerSGDState, index: int, gradients: list[torch.Tensor]
) -> tuple[list[_Matrices], list[torch.Tensor]]:
    """The gradients worth compressing, stacked by shape with their error added; and the other gradients."""
    by_shape: dict[tuple[int, int], list[torch.Tensor]] = {}
    plain = []
    for gradient in gradients:
        rows = gradient.shape[0] if gradient.dim() > 1 else 0
        columns = gradient.numel() // rows if rows else 0
        if rows and (rows + columns) * state.rank < gradient.numel():
            by_shape.setdefault((rows, columns), []).append(gradient)
        else:
            plain.append(gradient)
    if index in state.memory.errors:
        stacks, factors = state.memory.errors[index], state.memory.factors[index]
        for stack, (shape, views) in zip(stacks, by_shape.items(), strict=True):
            for matrix, view in zip(stack, views, strict=True):
                matrix.add_(view.reshape(shape))
    else:
        stacks = [torch.stack([view.reshape(shape) for view in views]) for shape, views in by_shape.items()]
        factors = [_first_factor(stack, state.rank, index) for stack in stacks]
    return [
        _Matrices(views, shape, stack, q)
        for (shape, views), stack, q in zip(by_shape.items(), stacks, factors, strict=True)
    ], plain


def _first_factor(stack: torch.Tensor, rank: int, index: int) -> torch.Tensor:
    """A random orthonormal q, equal on all ranks; the script's random generators are not used."""
    generator = torch.Generator().manual_seed(_SEED + index)
    # Not on the default device, which a script may set to its GPU: the generator is the CPU's.
    draw = torch.randn(stack.shape[0], stack.shape[2], rank, generator=generator, device="cpu")
    return _orthogonal(draw.transpose(1, 2).contiguous()).to(stack)


def _orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Make the rows of [count, rank, length] orthonormal; may overwrite `matrices`. A row of zeros stays zero.

    16-bit factors are computed in float32. torch's QR is not used, because for such small ranks it costs more than the
    products themselves.
    """
    working = matrices.float() if matrices.dtype in (torch.float16, torch.bfloat16) else matrices
    # On a GPU the number of kernels decides: Gram-Schmidt takes twelve for each row, Cholesky nine in each of 3 passes.
    on_gpu = is_gpu(working.device) and working.shape[1] >= _ROWS_OF_CHOLESKY
    return (by_cholesky(working) if on_gpu else by_gram_schmidt(working)).to(matrices.dtype)


def by_cholesky(working: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows of [count, rank, length] by three passes of Cholesky QR (Yamamoto et al., 2015).

    Each pass divides the rows by the Cholesky factor of their products. If rows are nearly parallel, the first pass
    leaves mostly rounding errors, the second nearly orthogonal rows, and the third is as good as Gram-Schmidt. A little
    is added to the diagonal, because the factor of parallel rows would not exist otherwise.
    """
    rank = working.shape[1]
    little = 16 * rank * torch.finfo(working.dtype).eps
    diagonal = torch.eye(rank, dtype=working.dtype, device=working.device).mul_(little)
    for _ in range(3):
        working = working / working.norm(dim=2, keepdim=True).clamp_min(1e-30)
        products = torch.baddbmm(diagonal, working, working.transpose(1, 2))
        factor, _info = torch.linalg.cholesky_ex(products)  # unlike cholesky, it does not wait for the device
        working = torch.linalg.solve_triangular(factor, working, upper=False)
    return torch.div(working, working.norm(dim=2, keepdim=True).clamp_min(1e-30))


def by_gram_schmidt(working: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows of [count, rank, length] by modified Gram-Schmidt, in place.

    If the gradients have a lower rank, only rounding errors are left of a row, and their direction is arbitrary. So
    each row is made orthogonal a second time; otherwise it would repeat parts of the rows before it.
    """
    for row in range(working.shape[1]):
        this = working[:, row : row + 1]
        this.div_(this.norm(dim=2, keepdim=True).clamp_min(1e-30))
        if row:
            before = working[:, :row]
            this.sub_((this @ before.transpose(1, 2)) @ before)
            this.div_(this.norm(dim=2, keepdim=True).clamp_min(1e-30))
        rest = working[:, row + 1 :]
        if rest.shape[1]:
            rest.sub_((rest @ this.transpose(1, 2)) @ this)
    return working


def _cut(wire: torch.Tensor, offset: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """The tensor of `shape` at `offset` in the flat `wire`, and the offset behind it."""
    count = 1
    for size in shape:
        count *= size
    return wire[offset : offset + count].view(shape), offset + count
