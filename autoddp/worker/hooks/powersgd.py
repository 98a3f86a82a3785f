"""PowerSGD (Vogels et al., 2019): each gradient matrix travels as two thin factors, the error is fed back.

torch's own hook issues its second collective from a future's callback, whose order differs between ranks: with more
than one bucket in flight gloo aborts the process. Here every collective is issued from the hook itself, in bucket
order, as a pipeline: the hook call for bucket i+1 issues that bucket's first collective and then finishes the first
half of bucket i; the last bucket drains the pipeline. So the order is the same on all ranks, for any number of buckets
and any backend, and the first collectives still overlap with backward.

The thin factors are kept as rows, [count, rank, …], and stand on the left of every product: with MKL a thin factor on
the right is 7 to 30 times slower, and the products would cost more than a backward pass.

Batched, the whole bucket is one nearly square matrix, whatever gradients lie in it.
"""

import contextlib
import functools
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
from autoddp.worker.hooks.bucket import GradBucket
from autoddp.worker.hooks.exact import exact_mean

_ROWS_OF_CHOLESKY = 4
_SEED = 20191  # the factors' first draw: any number, the same on all ranks


@dataclass
class _Matrices:
    """Gradients of one bucket that share a shape, stacked: views into the bucket, or copies of them."""

    views: list[torch.Tensor]
    shape: tuple[int, int]
    stacked: torch.Tensor
    """[count, rows, columns]: gradient plus the error fed back; what is left out of it is the next error."""
    q: torch.Tensor
    """[count, rank, columns]."""


@dataclass
class _Flight:
    """A bucket whose factors are on the way."""

    bucket: torch.Tensor
    matrices: list[_Matrices]
    plain: list[torch.Tensor]
    """Gradients too small or too thin to compress: they travel whole, beside the first factors."""
    wire: torch.Tensor
    work: dist.Work
    future: torch.futures.Future[torch.Tensor]
    index: int
    p: list[torch.Tensor] = field(default_factory=list)


@dataclass
class PowerSGDState:
    """Kept from step to step. Memory: the error is as large as the gradients."""

    group: dist.ProcessGroup
    rank: int
    start_step: int
    """Reductions done exactly first."""
    batched: bool = False
    """Each bucket is one matrix, in place of each gradient."""
    wire_type: torch.dtype | None = None
    """In which the factors, and the gradients beside them, travel; as they are if None. The error fed back makes up
    for what rounding takes from the factors."""
    step: int = 0
    errors: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Bucket index → what compression has left out so far, one stack per shape."""
    factors: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Bucket index → last step's q, orthonormal: a warm start of the power iteration."""
    owners: dict[int, list[int]] = field(default_factory=dict)
    """Bucket index → the parameters that both belong to, by identity."""
    flights: list[_Flight] = field(default_factory=list)
    unnumbered: bool = False
    """Whether DDP does not number its buckets at present."""


def powersgd(
    configuration: Configuration, group: dist.ProcessGroup, start: int | None
) -> tuple[PowerSGDState, Callable[[PowerSGDState, GradBucket], torch.futures.Future[torch.Tensor]]]:
    """The hook "powersgd" with the state that its knobs ask for; `start` overrides the knob's reductions before it."""
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
    """Mean over the ranks, projected on `state.rank` directions per matrix."""
    compress = state.step >= state.start_step
    if bucket.is_last():
        state.step += 1
    if not compress:
        return exact_mean(state.group, bucket)
    with _beside_the_backward_pass(bucket.buffer().device):
        return _compressed(state, bucket)


@contextlib.contextmanager
def _beside_the_backward_pass(device: torch.device) -> Iterator[None]:
    """On a stream of the hook's own: each wait for a collective would hold up the rest of the backward pass on its.

    And without autocast, which a script may have on around its backward pass: the factors are products of gradients.
    """
    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))  # where the bucket was filled
        with torch.cuda.stream(stream):
            yield


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all models and trials: the allocator keeps what was freed on a stream for that stream."""
    return torch.cuda.Stream(device)


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
    """In the first pass over a static graph whose buckets follow a plan, DDP calls every bucket number 0 and none the
    last (torch 2.13). Nobody can tell then when to drain the pipeline, so each call drains it until numbers return."""
    if any(flight.index >= index for flight in state.flights):
        state.unnumbered = True
    elif index > 0:
        state.unnumbered = False


def _take_off(state: PowerSGDState, bucket: GradBucket) -> None:
    """Issue the first collective of a bucket: every pᵀ = qᵀ Mᵀ, and the plain gradients beside them."""
    index, buffer = bucket.index(), bucket.buffer()
    _drop_what_belongs_to_others(state, index, [id(parameter) for parameter in bucket.parameters()])
    matrices, plain = _sort(state, index, _as_one_matrix(buffer) if state.batched else bucket.gradients())
    wire = _to_send(state, [torch.bmm(m.q, m.stacked.transpose(1, 2)) for m in matrices] + plain)
    work = dist.all_reduce(wire, group=state.group, async_op=True)
    devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type != "cpu" else []
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    state.flights.append(_Flight(buffer, matrices, plain, wire, work, future, index))


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
    flight.work = dist.all_reduce(flight.wire, group=state.group, async_op=True)


def _land(state: PowerSGDState) -> None:
    """Receive every q, write p qᵀ into the buckets, keep the error, and hand the buckets back to DDP."""
    flights, state.flights = state.flights, []
    for flight in flights:
        received = _received(flight) if flight.matrices else flight.wire
        offset, errors, factors = 0, [], []
        for m, p in zip(flight.matrices, flight.p, strict=True):
            q, offset = _cut(received, offset, tuple(m.q.shape))
            for view, matrix, rows, columns in zip(m.views, m.stacked, p, q, strict=True):
                _write_product(view, rows, columns)
                matrix.sub_(view.reshape(m.shape))
            # An overflow (AMP looks for its scale by them) must not be fed back for ever.
            errors.append(m.stacked.nan_to_num_(0.0, 0.0, 0.0))
            factors.append(_orthogonal(_usable(q, m.q)))
        state.errors[flight.index], state.factors[flight.index] = errors, factors
        flight.future.set_result(flight.bucket)


def _to_send(state: PowerSGDState, parts: list[torch.Tensor]) -> torch.Tensor:
    """This rank's share of the mean, flat. Divided before it is rounded, so that the sum keeps to the type's range."""
    share = torch.cat([part.reshape(-1) for part in parts]).div_(state.group.size())
    return share if state.wire_type is None else share.to(state.wire_type)


def _received(flight: _Flight) -> torch.Tensor:
    """What has arrived, in the bucket's own type."""
    flight.work.wait()
    return flight.wire.to(flight.bucket.dtype)


def _as_one_matrix(bucket: torch.Tensor) -> list[torch.Tensor]:
    """Views of a flat bucket: nearly square, and the rest, which is shorter than a row."""
    rows = max(1, math.isqrt(bucket.numel()))
    columns = bucket.numel() // rows
    return [bucket[: rows * columns].view(rows, columns), bucket[rows * columns :]]


def _write_product(view: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """view = rowsᵀ columns, without a copy in between where the gradient lies as its matrix does."""
    if view.is_contiguous():
        torch.mm(rows.t(), columns, out=view.view(rows.shape[1], columns.shape[1]))
    else:
        view.copy_(torch.mm(rows.t(), columns).view(view.shape))


def _usable(q: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """A copy of q, with the row before where one is zero or not finite: no iteration ever leaves those again."""
    norm = q.norm(dim=2, keepdim=True)
    return torch.where((norm > 0) & (norm < float("inf")), q, before)


def _drop_what_belongs_to_others(state: PowerSGDState, index: int, owners: list[int]) -> None:
    """After the first step DDP rebuilds its buckets: what was kept under an index then belongs to other tensors."""
    if state.owners.get(index) != owners:
        state.errors.pop(index, None)
        state.factors.pop(index, None)
        state.owners[index] = owners


def _sort(
    state: PowerSGDState, index: int, gradients: list[torch.Tensor]
) -> tuple[list[_Matrices], list[torch.Tensor]]:
    """Gradients worth compressing, stacked by shape with their error added; and the others."""
    by_shape: dict[tuple[int, int], list[torch.Tensor]] = {}
    plain = []
    for gradient in gradients:
        rows = gradient.shape[0] if gradient.dim() > 1 else 0
        columns = gradient.numel() // rows if rows else 0
        if rows and (rows + columns) * state.rank < gradient.numel():
            by_shape.setdefault((rows, columns), []).append(gradient)
        else:
            plain.append(gradient)
    if index in state.errors:
        stacks, factors = state.errors[index], state.factors[index]
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
    """A random orthogonal q, equal on all ranks; the script's own random numbers are left alone."""
    generator = torch.Generator().manual_seed(_SEED + index)
    draw = torch.randn(stack.shape[0], stack.shape[2], rank, generator=generator).transpose(1, 2).contiguous()
    return _orthogonal(draw).to(stack)


def _orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows, of what may be used up. [count, rank, length]; rank is small. A row of zeros stays one.

    16-bit factors become float32 here. torch's QR costs more than the products themselves at these widths.
    """
    working = matrices.float() if matrices.dtype in (torch.float16, torch.bfloat16) else matrices
    # Kernels are what costs on a GPU: twelve for each row, or nine for each of three passes.
    on_gpu = working.is_cuda and working.shape[1] >= _ROWS_OF_CHOLESKY
    return (by_cholesky(working) if on_gpu else by_gram_schmidt(working)).to(matrices.dtype)


def by_cholesky(working: torch.Tensor) -> torch.Tensor:
    """Each pass divides the rows by the factor of their own products (Cholesky QR, Yamamoto et al., 2015).

    Of nearly parallel rows the first pass leaves rounding, the second something that is nearly orthogonal, the third
    what Gram-Schmidt would. A little is added to the diagonal, or the factor of parallel rows would not exist.
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
    """Modified Gram-Schmidt, in place.

    Where the gradients have less rank than that, what is left of a row is rounding, which lies anywhere: it is made
    orthogonal once more, or it would count again what the rows before have carried.
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
    """The next tensor of `shape` in the flat `wire`, and where the one after it begins."""
    count = 1
    for size in shape:
        count *= size
    return wire[offset : offset + count].view(shape), offset + count
