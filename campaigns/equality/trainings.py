"""Small trainings, one for each habit that real scripts have: 40 steps on two ranks, then the parameters.

Each is a function of the rank that builds its own DDP objects and gives back its modules. All that a knob stands in
front of is looked up when it is used, since these functions are imported before any knob is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import prune

STEPS, FEATURES, WIDTH, CLASSES, BATCH = 40, 32, 256, 8, 8
TURN = STEPS // 2
"""The step from which on some trainings do something else."""
_OF_AN_OBJECT = 8  # steps, where a training builds one DDP object after another


def shorten() -> None:
    """Leave trainings the steps that they need to be tuned: `make test` runs such ones."""
    global STEPS, TURN
    STEPS, TURN = 24, 12


MOMENTUM = [0.9]
"""0 where ranks train apart for some steps: their parameters are put together again then, their optimizers are not."""

Batch = tuple[torch.Tensor, torch.Tensor]
Training = Callable[[int], list[nn.Module]]


def network(width: int = WIDTH, *more: nn.Module) -> nn.Sequential:
    """1.1 MiB of gradients: three buckets of the smallest cap. The same weights on every rank."""
    torch.manual_seed(7)
    middle = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), *middle, nn.Linear(width, CLASSES), *more)


def batches(rank: int, count: int, size: int = BATCH) -> Iterator[Batch]:
    source = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        inputs = torch.randn(size, FEATURES, generator=source)
        yield inputs, inputs[:, :CLASSES].argmax(dim=1)


def loss(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, batch[1])


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    """With momentum and weight decay: a gradient of zeros is not the same as none."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.SGD(parameters, lr=0.05, momentum=MOMENTUM[0], weight_decay=1e-3)


def plain(rank: int) -> list[nn.Module]:
    model = DDP(network())
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


def zeros(rank: int) -> list[nn.Module]:
    """Gradients are set to zero, not to None: they live on, also inside buckets."""
    model = DDP(network())
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        loss(model(batch[0]), batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [model]


def zeros_of_old(rank: int, begins: int = 0) -> list[nn.Module]:
    """Gradients are set to zero as torch itself did before 1.7; now and then, from step `begins` on."""
    model = DDP(network())
    optimizer = sgd(model)
    for step, batch in enumerate(batches(rank, STEPS)):
        loss(model(batch[0]), batch).backward()
        optimizer.step()
        if step < begins or step % 5:
            optimizer.zero_grad()
            continue
        for p in model.parameters():
            assert p.grad is not None
            p.grad.detach_()
            p.grad.zero_()
    return [model]


def clip(rank: int) -> list[nn.Module]:
    model = DDP(network())
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return [model]


def clip_by_hand(rank: int) -> list[nn.Module]:
    """Reads and scales the gradients itself, over micro-batches of which the last step of a round has one less."""
    model = DDP(network())
    optimizer = sgd(model)
    data = batches(rank, STEPS * 2)
    for step in range(STEPS):
        for _ in range(1 if step % 5 == 4 else 2):
            batch = next(data)
            (loss(model(batch[0]), batch) / 2).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.mul_(0.3 / norm)
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def clip_at_usual_norm(rank: int) -> list[nn.Module]:
    """AutoClip: the norm at which torch clips is that of the calmest quarter of the steps; the script reads the norms.

    The last step of a round has fewer micro-batches.
    """
    model = DDP(network())
    optimizer = sgd(model)
    data = batches(rank, STEPS * 4)
    norms: list[float] = []
    for step in range(STEPS):
        for _ in range(2 if step % 10 == 9 else 4):
            batch = next(data)
            (loss(model(batch[0]), batch) / 4).backward()
        norms.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))
        nn.utils.clip_grad_norm_(model.parameters(), sorted(norms)[len(norms) // 4])
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def rate_by_norms(rank: int) -> list[nn.Module]:
    """The learning rate depends on the norms after each micro-batch, which the script only reads."""
    model = DDP(network())
    optimizer = sgd(model)
    data = batches(rank, STEPS * 4)
    for _ in range(STEPS):
        size = 0.0
        for _ in range(4):
            batch = next(data)
            (loss(model(batch[0]), batch) / 4).backward()
            size += float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + size)
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def clamped_within_passes(rank: int) -> list[nn.Module]:
    """A hook clamps each gradient with what it has so far, inside the backward pass."""
    model = DDP(network())
    optimizer = sgd(model)

    def clamp(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.001, 0.001)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clamp)
    data = batches(rank, STEPS * 4)
    for _ in range(STEPS):
        for _ in range(4):
            batch = next(data)
            (loss(model(batch[0]), batch) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def hands_gradients_on(rank: int) -> list[nn.Module]:
    """Reads gradients only to see which are there, and for a function of torch; the last step of a round is shorter."""
    model = DDP(network())
    optimizer = sgd(model)
    data = batches(rank, STEPS * 4)
    for step in range(STEPS):
        for _ in range(2 if step % 10 == 9 else 4):
            batch = next(data)
            (loss(model(batch[0]), batch) / 4).backward()
        with_gradients = [p for p in model.parameters() if p.grad is not None]
        assert not any(p.grad is None for p in with_gradients)
        norm = nn.utils.get_total_norm([p.grad for p in with_gradients])
        nn.utils.clip_grads_with_norm_(with_gradients, 0.3, norm)
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def changes_by_data(rank: int) -> list[nn.Module]:
    """As older scripts do: the version counter of `p.grad` does not see what is done to `p.grad.data`."""
    model = DDP(network())
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        for p in model.parameters():
            p.grad.data.clamp_(-0.001, 0.001)
        optimizer.step()
    return [model]


def gives_other_memory(rank: int) -> list[nn.Module]:
    """Gradients get other memory by `p.grad.data = …`: parts of one tensor of the script's in some steps."""
    model = DDP(network())
    optimizer, parameters = sgd(model), list(model.parameters())
    for step, batch in enumerate(batches(rank, STEPS)):
        optimizer.zero_grad(set_to_none=step % 4 < 2)
        loss(model(batch[0]), batch).backward()
        clamped = torch.cat([p.grad.flatten() for p in parameters]).clamp_(-0.001, 0.001)
        for p, part in zip(parameters, clamped.split([p.numel() for p in parameters]), strict=True):
            p.grad.data = part.view_as(p) if step % 3 else part.view_as(p).clone()
        clamped.mul_(0.5)
        optimizer.step()
    return [model]


def scaler(rank: int, by_hand: bool = False) -> list[nn.Module]:
    """`by_hand`: it clips the unscaled gradients itself."""
    model = DDP(network())
    optimizer = sgd(model)
    grad_scaler = torch.amp.GradScaler("cpu", growth_interval=5)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        grad_scaler.scale(loss(model(batch[0]), batch)).backward()
        grad_scaler.unscale_(optimizer)
        if by_hand:
            for p in model.parameters():
                p.grad.clamp_(-0.001, 0.001)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        grad_scaler.step(optimizer)
        grad_scaler.update()
    return [model]


def beside(rank: int, scaled: bool = False, apart: bool = False, begins: int = 0) -> list[nn.Module]:
    """A criterion that is trained too, and that DDP does not reduce; from step `begins` on, by a group of its own.

    `apart`: by an optimizer of its own.
    """
    model = DDP(network())
    criterion = nn.Linear(CLASSES, CLASSES)
    optimizer = sgd(model) if apart or begins else sgd(model, criterion)
    optimizers = [optimizer, sgd(criterion)] if apart else [optimizer]
    grad_scaler = torch.amp.GradScaler("cpu", enabled=scaled, growth_interval=5)
    for step, batch in enumerate(batches(rank, STEPS)):
        if begins and step == begins:
            optimizer.add_param_group({"params": list(criterion.parameters())})
        for one in optimizers:
            one.zero_grad()
        grad_scaler.scale(loss(criterion(model(batch[0])), batch)).backward()
        for one in optimizers:
            grad_scaler.unscale_(one)
        for module in (model, criterion):
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        for one in optimizers:
            grad_scaler.step(one)
        grad_scaler.update()
    return [model, criterion]


class Counts(torch.optim.SGD):
    """Counts its steps in its groups, as Lamb and the optimizers without a schedule do, and goes by the count."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.05 / group["count"]
        super().step(closure)


class Around(torch.optim.Optimizer):
    """Steps by another optimizer of the same parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


def stepped_by(rank: int, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[nn.Module]:
    model = DDP(network())
    optimizer = make(list(model.parameters()))
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


def by_turns(rank: int) -> list[nn.Module]:
    """Two DDP objects, of which each step trains one, by one optimizer."""
    wide, narrow = DDP(network()), DDP(network(64))
    optimizer = sgd(wide, narrow)
    for step, batch in enumerate(batches(rank, STEPS)):
        optimizer.zero_grad()
        loss((wide, narrow)[step % 2](batch[0]), batch).backward()
        optimizer.step()
    return [wide, narrow]


def returns_loss(rank: int) -> list[nn.Module]:
    """The optimizer gets a closure that only tells the loss: the backward pass is over by then."""
    model = DDP(network())
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        found = loss(model(batch[0]), batch)
        found.backward()
        optimizer.step(lambda found=found: float(found))
    return [model]


def sparse(rank: int) -> list[nn.Module]:
    """The gradient of an embedding is sparse; each reduces, and the last step of a round has fewer."""
    torch.manual_seed(7)
    model = DDP(nn.Sequential(nn.EmbeddingBag(64, FEATURES, sparse=True), network()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = batches(rank, STEPS * 4)
    for step in range(STEPS):
        for _ in range(1 if step % 10 == 9 else 4):
            inputs, targets = next(data)
            (loss(model((inputs * 7).long() % 64), (inputs, targets)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def buffers(rank: int) -> list[nn.Module]:
    """BatchNorm: its running statistics are rank 0's before each forward pass."""
    model = DDP(network(WIDTH, nn.BatchNorm1d(CLASSES)))
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


def two(rank: int) -> list[nn.Module]:
    """Two DDP objects in one loss."""
    wide, narrow = DDP(network()), DDP(network(64))
    optimizer = sgd(wide, narrow)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(wide(batch[0]) + narrow(batch[0]), batch).backward()
        optimizer.step()
    return [wide, narrow]


def second_later(rank: int) -> list[nn.Module]:
    """The second DDP object is built when the first has long been trained."""
    first = DDP(network())
    optimizer = sgd(first)
    data = batches(rank, STEPS)
    for _ in range(TURN):
        batch = next(data)
        optimizer.zero_grad()
        loss(first(batch[0]), batch).backward()
        optimizer.step()
    second = DDP(network(64))
    optimizer = sgd(first, second)
    for batch in data:
        optimizer.zero_grad()
        loss(first(batch[0]) + second(batch[0]), batch).backward()
        optimizer.step()
    return [first, second]


def folds(rank: int) -> list[nn.Module]:
    """One model after another. On rank 0 the first one is still there: the garbage collector has not come by."""
    data, kept = batches(rank, 4 * STEPS), []
    for _ in range(2):
        model = DDP(network())
        optimizer = sgd(model)
        for _ in range(STEPS // 2):
            optimizer.zero_grad()
            for _ in range(4):
                batch = next(data)
                (loss(model(batch[0]), batch) / 4).backward()
            optimizer.step()
        if rank == 0:
            kept.append(model)
    return [model]


def new_objects(rank: int, micro_batches: int) -> list[nn.Module]:
    """A new DDP object around the same model every eighth step. On rank 0 the earlier ones are still there."""
    net, data, kept = network(), batches(rank, micro_batches * STEPS), []
    optimizer = sgd(net)
    for step in range(STEPS):
        if step % _OF_AN_OBJECT == 0:
            model = DDP(net)
            if rank == 0:
                kept.append(model)
        optimizer.zero_grad()
        for _ in range(micro_batches):
            batch = next(data)
            (loss(model(batch[0]), batch) / micro_batches).backward()
        optimizer.step()
    return [model]


class Faint(nn.Module):
    """Gradients of its first layer are a million times smaller than those of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = network()
        self.first = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.rest(inputs + 1e-6 * self.first(inputs))


def faint(rank: int) -> list[nn.Module]:
    """Adam steps by the sign of a gradient, however small it is. Only the faint layer is looked at."""
    model = DDP(Faint())
    betas = (MOMENTUM[0], MOMENTUM[0] and 0.99)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=betas, eps=1e-12)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        (loss(model(batch[0]), batch) / 100).backward()
        optimizer.step()
    return [model.module.first]


def networks_of_gan() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    generator = nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, FEATURES))
    return generator, nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def gan(rank: int) -> list[nn.Module]:
    generator, discriminator = map(DDP, networks_of_gan())
    of_g, of_d = sgd(generator), sgd(discriminator)
    noise = torch.Generator().manual_seed(rank)

    def judged(scores: torch.Tensor, real: float) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))

    for real, _ in batches(rank, STEPS):
        fake = generator(torch.randn(BATCH, CLASSES, generator=noise))
        of_d.zero_grad()
        (judged(discriminator(real), 1.0) + judged(discriminator(fake.detach()), 0.0)).backward()
        of_d.step()
        of_g.zero_grad()
        judged(discriminator(fake), 1.0).backward()  # leaves gradients in D too, which nobody steps
        of_g.step()
    return [generator, discriminator]


def siamese(rank: int) -> list[nn.Module]:
    """Two forward passes before one backward pass."""
    model = DDP(network())
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        (loss(model(batch[0]), batch) + loss(model(batch[0] * 0.5), batch)).backward()
        optimizer.step()
    return [model]


def accumulated(rank: int, micro_batches: int, begins: int = 0, uneven: bool = False) -> list[nn.Module]:
    """Under no_sync, all but the last micro-batch; one micro-batch a step before step `begins`."""
    model = DDP(network())
    optimizer = sgd(model)
    data = batches(rank, STEPS * (micro_batches + 1))
    for step in range(STEPS):
        count = (micro_batches + (rank if uneven else 0)) if step >= begins else 1
        for number in range(count):
            batch = next(data)
            with contextlib.nullcontext() if number == count - 1 else model.no_sync():
                (loss(model(batch[0]), batch) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def toggled(rank: int) -> list[nn.Module]:
    """As nanoGPT does: by assigning the flag."""
    model = DDP(network())
    optimizer = sgd(model)
    data = batches(rank, STEPS * 3)
    for _ in range(STEPS):
        for number in range(3):
            model.require_backward_grad_sync = number == 2
            batch = next(data)
            (loss(model(batch[0]), batch) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def local_sgd(rank: int) -> list[nn.Module]:
    """Never reduces: the ranks differ on purpose."""
    model = DDP(network())
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


def local_later(rank: int) -> list[nn.Module]:
    """Reduces at first, and then no more: as post-local SGD."""
    model = DDP(network())
    optimizer = sgd(model)
    for step, batch in enumerate(batches(rank, STEPS)):
        optimizer.zero_grad()
        with model.no_sync() if step >= TURN else contextlib.nullcontext():
            loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


def micro(rank: int, counts: Callable[[int], int], clips: bool = False) -> list[nn.Module]:
    """Accumulates without no_sync: each backward pass reduces. `counts(step)` micro-batches."""
    model = DDP(network(WIDTH, nn.BatchNorm1d(CLASSES)))
    optimizer = sgd(model)
    data = batches(rank, STEPS * 4)
    for step in range(STEPS):
        for _ in range(counts(step)):
            batch = next(data)
            (loss(model(batch[0]), batch) / 4).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def surgery(
    rank: int, keep: Callable[[nn.Parameter], torch.Tensor | None], begins: int = 0, zeroes: bool = False
) -> list[nn.Module]:
    """Adds the gradients of two losses by hand from step `begins` on, from what `keep` returns of the first."""
    model = DDP(network())
    optimizer, parameters = sgd(model), list(model.parameters())
    data = batches(rank, STEPS * 2)
    for step in range(STEPS):
        first, second = next(data), next(data)
        optimizer.zero_grad(set_to_none=not zeroes)
        loss(model(first[0]), first).backward()
        if step >= begins:
            kept = [keep(p) for p in parameters]
            optimizer.zero_grad(set_to_none=not zeroes)
            loss(model(second[0]), second).backward()
            for p, other in zip(parameters, kept, strict=True):
                p.grad = p.grad + other.view_as(p)
            del kept, other
        optimizer.step()
    return [model]


def last_gradient(rank: int) -> list[nn.Module]:
    """Adds a part of the last step's gradients, to which it keeps references."""
    model = DDP(network())
    optimizer, parameters = sgd(model), list(model.parameters())
    last: list[torch.Tensor] = []
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        made = [p.grad for p in parameters]
        for p, before in zip(parameters, last, strict=False):
            p.grad = p.grad + 0.3 * before
        last = made
        optimizer.step()
    return [model]


def rate_by_graph(rank: int) -> list[nn.Module]:
    """The learning rate is trained too, by a graph that holds the gradients of the step before; later on alone."""
    model = DDP(network())
    optimizer, parameters = sgd(model), list(model.parameters())
    rate, change = torch.tensor(0.05, requires_grad=True), torch.tensor(0.0, requires_grad=True)
    for step, batch in enumerate(batches(rank, STEPS)):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        if step > TURN:
            change.backward()
        if step >= TURN:
            change = torch.stack([(p.grad * rate).square().sum() for p in parameters]).sum()
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + float(0 if rate.grad is None else rate.grad))
        optimizer.step()
    return [model]


def noise_scale(rank: int) -> list[nn.Module]:
    """The learning rate depends on a gradient that is read and cleared before that of the step is made."""
    model = DDP(network())
    optimizer, parameters = sgd(model), list(model.parameters())
    data = batches(rank, STEPS * 2)
    for _ in range(STEPS):
        first, second = next(data), next(data)
        optimizer.zero_grad()
        loss(model(first[0]), first).backward()
        size = float(torch.stack([p.grad.square().sum() for p in parameters]).sum())
        optimizer.zero_grad()
        loss(model(second[0]), second).backward()
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + size)
        optimizer.step()
    return [model]


def one_flat_gradient(rank: int, begins: int = 0) -> list[nn.Module]:
    """The gradients are parts of one tensor of the script's, which it scales as a whole; -1: before DDP is built."""
    module = network()
    parameters = list(module.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))

    def begin() -> None:
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)

    if begins < 0:
        begin()
    model = DDP(module)
    optimizer = sgd(model)
    for step, batch in enumerate(batches(rank, STEPS)):
        if step == begins:
            begin()
        if step >= begins:
            flat.zero_()
        else:
            optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        if step >= begins:
            flat.mul_(0.5)
        optimizer.step()
    return [model]


def held_through_zeros(rank: int) -> list[nn.Module]:
    """The gradients of the first step are held for good, and are set to zero in each step."""
    model = DDP(network())
    optimizer = sgd(model)
    held: list[torch.Tensor] = []
    for batch in batches(rank, STEPS):
        for gradient in held:
            gradient.zero_()
        loss(model(batch[0]), batch).backward()
        held = held or [p.grad for p in model.parameters()]
        torch._foreach_mul_(held, 0.5)
        optimizer.step()
    return [model]


def short_batch(rank: int) -> list[nn.Module]:
    """The last batch of each epoch is shorter, and shorter still on the last rank."""
    model = DDP(network())
    optimizer = sgd(model)
    for step, (inputs, targets) in enumerate(batches(rank, STEPS)):
        size = BATCH if step % 8 != 7 else 3 - rank
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[:size]), targets[:size]).backward()
        optimizer.step()
    return [model]


class Branches(nn.Module):
    """A trunk and two heads, of which a call uses those asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = network()
        self.heads = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(2))

    def forward(self, inputs: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        trunk = self.trunk(inputs)
        return sum((self.heads[number](trunk) for number in used), trunk)


def branches(
    rank: int,
    used: Callable[[int, int], tuple[int, ...]],
    micro_batches: int = 1,
    zeroes: bool = False,
    short: bool = False,
) -> list[nn.Module]:
    """`used(step, rank)`: heads. `short`: each third step has one micro-batch less."""
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = sgd(model)
    data = batches(rank, STEPS * micro_batches)
    for step in range(STEPS):
        for number in range(micro_batches - (short and step % 3 == 2)):
            batch = next(data)
            loss(model(batch[0], used(step + number, rank)), batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zeroes)
    return [model]


def sync_bn(rank: int) -> list[nn.Module]:
    module = nn.SyncBatchNorm.convert_sync_batchnorm(network(WIDTH, nn.BatchNorm1d(CLASSES)))
    model = DDP(module)
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


def thawed(rank: int) -> list[nn.Module]:
    """The first layer is frozen after DDP was built, and thawed at half-time."""
    model = DDP(network(), find_unused_parameters=True)
    optimizer = sgd(model)
    for step, batch in enumerate(batches(rank, STEPS)):
        for p in model.module[0].parameters():
            p.requires_grad_(step >= TURN)
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


def frozen_first(rank: int) -> list[nn.Module]:
    """The first layer is frozen when DDP is built: DDP never reduces it, also not where it is thawed later."""
    module = network()
    for p in module[0].parameters():
        p.requires_grad_(False)
    model = DDP(module)
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


def ignored(rank: int) -> list[nn.Module]:
    """DDP is told to leave the first layer alone: each rank has its own."""
    module = network()
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "0.bias"])
    model = DDP(module)
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


def joined(rank: int) -> list[nn.Module]:
    """Rank 1 has fewer batches."""
    model = DDP(network())
    optimizer = sgd(model)
    with model.join():
        for batch in batches(rank, STEPS - 6 * rank):
            optimizer.zero_grad()
            loss(model(batch[0]), batch).backward()
            optimizer.step()
    return [model]


def join_later(rank: int) -> list[nn.Module]:
    """An epoch as usual, then one inside join()."""
    model = DDP(network())
    optimizer = sgd(model)
    for inside in (False, True):
        with model.join() if inside else contextlib.nullcontext():
            for batch in batches(rank, TURN - (6 * rank if inside else 0)):
                optimizer.zero_grad()
                loss(model(batch[0]), batch).backward()
                optimizer.step()
    return [model]


def no_optimizer(rank: int) -> list[nn.Module]:
    """Steps by hand."""
    model = DDP(network())
    for batch in batches(rank, STEPS):
        loss(model(batch[0]), batch).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.05)
                p.grad = None
    return [model]


def without_backward(rank: int) -> list[nn.Module]:
    """Of a step's four forward passes with gradients, one leads to no backward pass."""
    model = DDP(network())
    optimizer = sgd(model)
    data = batches(rank, STEPS * 4)
    for _ in range(STEPS):
        for number in range(4):
            batch = next(data)
            found = loss(model(batch[0]), batch)
            if number != 3:
                found.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def closure(rank: int) -> list[nn.Module]:
    """The optimizer runs backward itself."""
    model = DDP(network())
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):

        def again(batch: Batch = batch) -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(model(batch[0]), batch)
            found.backward()
            return found

        optimizer.step(again)
    return [model]


def rank0_evaluates(rank: int) -> list[nn.Module]:
    """Rank 0 alone runs forward passes through the DDP object, in between; one of them with gradients."""
    model = DDP(network())
    optimizer = sgd(model)
    for step, batch in enumerate(batches(rank, STEPS)):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
        if rank == 0 and step % 3 == 1:
            with torch.no_grad():
                model(batch[0])
    return [model]


def penalty(rank: int) -> list[nn.Module]:
    """The loss has the gradient of the output with respect to the input in it: a pass that gives no gradients."""
    model = DDP(network())
    optimizer = sgd(model)
    for inputs, targets in batches(rank, STEPS):
        optimizer.zero_grad()
        inputs.requires_grad_()
        outputs = model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        (loss(outputs, (inputs, targets)) + 0.1 * (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
    return [model]


def adversarial(rank: int) -> list[nn.Module]:
    """Moves the inputs by a gradient from a pass of its own, before the gradients of the last step are cleared."""
    model = DDP(network())
    optimizer = sgd(model)
    for inputs, targets in batches(rank, STEPS):
        inputs.requires_grad_()
        (slope,) = torch.autograd.grad(loss(model(inputs), (inputs, targets)), inputs)
        optimizer.zero_grad()
        loss(model(inputs.detach() + 0.01 * slope.sign()), (inputs, targets)).backward()
        optimizer.step()
    return [model]


class Opaque(nn.Module):
    """Returns an object in which DDP finds no tensors."""

    class Output:
        def __init__(self, scores: torch.Tensor) -> None:
            self.scores = scores

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: torch.Tensor) -> Output:
        return self.Output(self.inner(inputs))


@dataclass
class Scores:
    """DDP finds the tensor in it where it looks for unused parameters, but not where it learns a static graph."""

    scores: torch.Tensor


class OfScores(dict[str, torch.Tensor]):
    """The same."""


def returns(
    rank: int, make: Callable[[torch.Tensor], Any], scores_of: Callable[[Any], torch.Tensor]
) -> list[nn.Module]:
    """`make` makes what the model returns of the scores, from which `scores_of` takes them."""
    module = network()
    module.register_forward_hook(lambda _module, _inputs, scores: make(scores))
    model = DDP(module)
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(scores_of(model(batch[0])), batch).backward()
        optimizer.step()
    return [model]


def head_of_its_own(rank: int, in_place: bool = False) -> list[nn.Module]:
    """Each rank gives the model a head of its own after DDP was built; `in_place` of the last layer."""
    model = DDP(network(), find_unused_parameters=in_place)
    torch.manual_seed(rank)
    if in_place:
        model.module[len(model.module) - 1] = nn.Linear(WIDTH, CLASSES)
    else:
        model.module.append(nn.Linear(CLASSES, CLASSES))
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


def masks_of_its_own(rank: int) -> list[nn.Module]:
    """Each rank gives the model buffers after DDP was built, which had none: masks that pruning makes, for a while."""
    model = DDP(network())
    optimizer = sgd(model)
    layers = [model.module[number] for number in (0, 2, 4)]
    for step, batch in enumerate(batches(rank, STEPS)):
        if step == TURN // 2:
            torch.manual_seed(rank)
            for layer in layers:
                prune.random_unstructured(layer, "weight", amount=0.3)
        if step == TURN + TURN // 2:
            for layer in layers:
                prune.remove(layer, "weight")
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


def opaque(rank: int) -> list[nn.Module]:
    model = DDP(Opaque())
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]).scores, batch).backward()
        optimizer.step()
    return [model]


def by_signs(_state, bucket):  # DDP reads a hook's annotations and wants its own types there
    """The signs of a bucket and one size for all of it."""
    buffer = bucket.buffer()
    buffer.copy_(buffer.sign() * buffer.abs().mean() / dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


def nothing_sent(_state, bucket):
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def own_hook(rank: int, hook: Callable[..., torch.futures.Future[torch.Tensor]]) -> list[nn.Module]:
    """The last step of a round has fewer micro-batches."""
    model = DDP(network())
    model.register_comm_hook(None, hook)
    optimizer = sgd(model)
    data = batches(rank, STEPS * 2)
    for step in range(STEPS):
        for _ in range(1 if step % 10 == 9 else 2):
            batch = next(data)
            (loss(model(batch[0]), batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def skips(rank: int, by_hand: bool = False) -> list[nn.Module]:
    """Leaves a step out where the norm is not finite, which each rank alone sees of its own batch now and then."""
    model = DDP(network())
    optimizer = sgd(model)
    for step, batch in enumerate(batches(rank, STEPS)):
        optimizer.zero_grad()
        found = loss(model(batch[0]), batch)
        (found * float("nan") if step % 14 == 10 + rank else found).backward()
        if by_hand:
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
    return [model]


def compiled_steps(rank: int, micro_batches: int) -> list[nn.Module]:
    """The whole step is a compiled function, with clipping, the optimizer and `zero_grad` in it."""
    model = DDP(network())
    optimizer = sgd(model)

    @torch.compile(backend="eager")
    def step(some: list[Batch]) -> None:
        for batch in some:
            (loss(model(batch[0]), batch) / len(some)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()

    data = batches(rank, STEPS * micro_batches)
    for _ in range(STEPS):
        step([next(data) for _ in range(micro_batches)])
    return [model]


def two_passes(rank: int) -> list[nn.Module]:
    """Two backward passes from one forward pass: DDP reduces in the first one only, so the ranks part."""
    model = DDP(network())
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        scores = model(batch[0])
        loss(scores, batch).backward(retain_graph=True)
        (0.01 * scores.square().mean()).backward()
        optimizer.step()
    return [model]


class Pulls(torch.optim.SGD):
    """Moves parameters in each step, with or without gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.999)


def clips_each(rank: int) -> list[nn.Module]:
    """Clips what there is after each micro-batch."""
    model = DDP(network())
    optimizer = sgd(model)
    data = batches(rank, STEPS * 2)
    for _ in range(STEPS):
        for _ in range(2):
            batch = next(data)
            (loss(model(batch[0]), batch) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def evaluates_average(rank: int) -> list[nn.Module]:
    """Keeps its weights in bounds itself, and now and then puts their average in their place for an evaluation."""
    model = DDP(network())
    optimizer, parameters = sgd(model), list(model.parameters())
    average = [p.detach().clone() for p in parameters]
    for step, batch in enumerate(batches(rank, STEPS)):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_clamp_min_(parameters, -0.15)
            torch._foreach_lerp_(average, parameters, 0.1)
            if step % 6 == 1:
                kept = [p.clone() for p in parameters]
                torch._foreach_copy_(parameters, average)
                model.eval()(batch[0])
                model.train()
                torch._foreach_copy_(parameters, kept)
    return [model]


def teaches_itself(rank: int) -> list[nn.Module]:
    """Each step begins with a pass in evaluation, by rank 0's running statistics."""
    model = DDP(network(WIDTH, nn.BatchNorm1d(CLASSES)))
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        with torch.inference_mode():
            hints = model.eval()(batch[0]).softmax(dim=1)
        optimizer.zero_grad()
        outputs = model.train()(batch[0])
        (loss(outputs, batch) + (outputs.softmax(dim=1) - hints.clone()).square().sum()).backward()
        optimizer.step()
    return [model]


class ManyTypes(nn.Module):
    """Parameters of several types and odd shapes, complex ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.turn = nn.Parameter(torch.randn(FEATURES, FEATURES, dtype=torch.complex64) / 6)
        self.phase = nn.Parameter(torch.ones((), dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(FEATURES, FEATURES, dtype=torch.float64) / 6)
        self.shift = nn.Parameter(torch.zeros(FEATURES, dtype=torch.bfloat16))
        self.scale, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        turned = (inputs.to(torch.complex64) @ self.turn) * self.phase
        mixed = (torch.view_as_real(turned).sum(dim=2).double() @ self.mix).float()
        return self.network(mixed * self.scale + self.shift.float() + self.empty.sum())


def many_types(rank: int) -> list[nn.Module]:
    model = DDP(ManyTypes())
    optimizer = sgd(model)
    for batch in batches(rank, STEPS):
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
    return [model]


TRAININGS: dict[str, Training] = {
    "plain": plain,
    "zeros": zeros,
    "zeros of old": zeros_of_old,
    "zeros of old later": lambda rank: zeros_of_old(rank, begins=TURN),
    "clip": clip,
    "scaler": scaler,
    "scaler by hand": lambda rank: scaler(rank, by_hand=True),
    "changes by .data": changes_by_data,
    "other memory": gives_other_memory,
    "beside": beside,
    "beside scaled": lambda rank: beside(rank, scaled=True),
    "beside apart": lambda rank: beside(rank, apart=True),
    "beside later": lambda rank: beside(rank, begins=TURN),
    "counts": lambda rank: stepped_by(rank, Counts),
    "around": lambda rank: stepped_by(
        rank, lambda given: Around(torch.optim.SGD(given, lr=0.05, momentum=MOMENTUM[0]))
    ),
    "by turns": by_turns,
    "returns loss": returns_loss,
    "sparse": sparse,
    "buffers": buffers,
    "two DDP": two,
    "second DDP later": second_later,
    "folds": folds,
    "new objects": lambda rank: new_objects(rank, 1),
    "new objects micro": lambda rank: new_objects(rank, 2),
    "faint layer": faint,
    "GAN": gan,
    "siamese": siamese,
    "no_sync 2": lambda rank: accumulated(rank, 2),
    "no_sync 4": lambda rank: accumulated(rank, 4),
    "no_sync later": lambda rank: accumulated(rank, 2, begins=TURN),
    "no_sync uneven": lambda rank: accumulated(rank, 2, uneven=True),
    "toggled": toggled,
    "local SGD": local_sgd,
    "local SGD later": local_later,
    "micro even": lambda rank: micro(rank, lambda step: 4),
    "micro uneven": lambda rank: micro(rank, lambda step: 4 - step % 3),
    "micro short last": lambda rank: micro(rank, lambda step: 1 if step % 10 == 9 else 4, clips=True),
    "clip by hand": clip_by_hand,
    "clip at usual norm": clip_at_usual_norm,
    "rate by norms": rate_by_norms,
    "clamped within": clamped_within_passes,
    "hands on": hands_gradients_on,
    "kept": lambda rank: surgery(rank, lambda p: p.grad),
    "kept detached": lambda rank: surgery(rank, lambda p: p.grad.detach()),
    "kept flat": lambda rank: surgery(rank, lambda p: p.grad.view(-1)),
    "kept clones": lambda rank: surgery(rank, lambda p: p.grad.clone()),
    "kept zeros": lambda rank: surgery(rank, lambda p: p.grad.clone(), zeroes=True),
    "kept later": lambda rank: surgery(rank, lambda p: p.grad, begins=TURN),
    "flat later": lambda rank: surgery(rank, lambda p: p.grad.view(-1), begins=TURN),
    "kept by DLPack later": lambda rank: surgery(rank, lambda p: torch.from_dlpack(p.grad), begins=TURN),
    "kept by a graph later": rate_by_graph,
    "last gradient": last_gradient,
    "noise scale": noise_scale,
    "one flat gradient": one_flat_gradient,
    "one flat before": lambda rank: one_flat_gradient(rank, begins=-1),
    "one flat later": lambda rank: one_flat_gradient(rank, begins=TURN),
    "held zeros": held_through_zeros,
    "short batch": short_batch,
    "find_unused": lambda rank: branches(rank, lambda step, rank: (0,)),
    "sometimes unused": lambda rank: branches(rank, lambda step, rank: (0, 1)[: step % 3]),
    "unused on a rank": lambda rank: branches(rank, lambda step, rank: ((step + rank) % 2,)),
    "micro unused": lambda rank: branches(rank, lambda step, rank: ((step + rank) % 2,) if step % 3 else (), 2),
    "micro unused short": lambda rank: branches(rank, lambda step, rank: (0, 1)[: step % 3], 2, short=True),
    "unused zeros": lambda rank: branches(rank, lambda step, rank: (0, 1)[: step % 3], zeroes=True),
    "SyncBatchNorm": sync_bn,
    "thawed": thawed,
    "frozen": frozen_first,
    "ignored": ignored,
    "join": joined,
    "join later": join_later,
    "closure": closure,
    "no optimizer": no_optimizer,
    "without backward": without_backward,
    "rank 0 evaluates": rank0_evaluates,
    "penalty": penalty,
    "adversarial": adversarial,
    "opaque": opaque,
    "dataclass": lambda rank: returns(rank, Scores, lambda found: found.scores),
    "kind of dict": lambda rank: returns(rank, lambda scores: OfScores(scores=scores), lambda found: found["scores"]),
    "head added": head_of_its_own,
    "head replaced": lambda rank: head_of_its_own(rank, in_place=True),
    "masks added": masks_of_its_own,
    "own hook": lambda rank: own_hook(rank, by_signs),
    "own hook local": lambda rank: own_hook(rank, nothing_sent),
    "compiled steps": lambda rank: compiled_steps(rank, 1),
    "compiled micro": lambda rank: compiled_steps(rank, 4),
    "two passes": two_passes,
    "skips": skips,
    "skips by hand": lambda rank: skips(rank, by_hand=True),
    "pulls": lambda rank: stepped_by(rank, lambda given: Pulls(given, lr=0.05, momentum=MOMENTUM[0])),
    "clips each": clips_each,
    "evaluates average": evaluates_average,
    "teaches itself": teaches_itself,
    "many types": many_types,
}

BESIDE = ("beside", "beside scaled", "beside apart", "beside later")
HEADS = ("head added", "head replaced")
PARTS = ("masks added", "two passes")
DIFFER_ON_PURPOSE = ("local SGD", "local SGD later", "ignored", "own hook local", *PARTS, *BESIDE, *HEADS)
"""Ranks end with other parameters, also under torchrun."""

NEVER_OFFERED = {"two passes": "defer_reductions"}
"""Training → a knob that tuning leaves out of it, as its cell "tuned" shows. torch's own reductions miss a part of its
gradients, and by this knob they would not."""

SKIPS_ALONE = ("skips", "skips by hand")
"""Behind passes without reduction each rank leaves out other steps, by its own code: one ends before the other."""

HOLDS_LAST = ("last gradient",)
"""They hold gradients of the step before: behind steps without reduction, those of each rank's own."""

_UNTIL_TURN = ("second DDP later", "folds", "join later", "beside later")


def by_hand_until(training: str) -> int | None:
    """The step from which on several steps of the training can be one no more: it changes, or builds another model."""
    if training.startswith("new objects"):
        return _OF_AN_OBJECT
    return TURN if training in _UNTIL_TURN else None


NO_LOOP_BY_HAND = ("noise scale", "kept later", "flat later", "kept by DLPack later", "skips", "skips by hand")
"""They clear gradients within each step: no loop makes several of them one. The steps that autoddp needs to see that
train nothing, and each later one is a step of its own. Or they go by the norm of gradients, which the loop does not
have."""


def parameters(modules: list[nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": p.detach().clone()
        for number, module in enumerate(modules)
        for name, p in module.named_parameters()
    }


def statistics(modules: list[nn.Module]) -> dict[str, torch.Tensor]:
    """The buffers."""
    return {
        f"{number}.{name}": value.detach().clone()
        for number, module in enumerate(modules)
        for name, value in module.named_buffers()
    }
