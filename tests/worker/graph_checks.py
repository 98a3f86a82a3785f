"""What each rank of test_graphs.py does: training loops with and without graphs, on real DDP models.

No GPU: `static_callables` stands for torch's capture, with its one set of buffers. Each loop is a way of training in
which a graph that stands in at the wrong moment gives other parameters.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from static_graphs import ON_THE_DEFAULT_STREAM, node_of, static_callables
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.errors import JobStops
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.graphs import Graphs

WIDTH, STEPS, WATCHED = 12, 12, 3
FORWARD = DDP._pre_forward, DDP._post_forward
"""What DDP calls around a forward pass without a patch: each patch goes through those before it."""


class Block(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.config.gain * self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(gain=1.0)
        self.gains = [1.0, 1.0]
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.left_out = -1

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        for number, block in enumerate(self.blocks):
            if number != self.left_out:
                x = block(x, scale=scale)
        return {"out": self.head(x) * self.gains[0], "features": x}


def batches(rank: int, size: int = 8, steps: int = STEPS) -> Iterator[torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(size, WIDTH, generator=source)


def reduces(ddp: DDP) -> bool:
    return bool(ddp.require_backward_grad_sync)


class Run:
    """One training: `step(loss)` ends a step of it; the graphs are turned on after some."""

    def __init__(self, mode: str, bucket_view: bool = True, find_unused: bool = False) -> None:
        torch.manual_seed(3)
        DDP._pre_forward, DDP._post_forward = FORWARD
        self.patch = Patch()
        self.graphs = Graphs(self.patch.alive, reduces, static_callables)
        self.patch.events = self.graphs
        self.patch.install()
        self.ddp = DDP(Model(), gradient_as_bucket_view=bucket_view, find_unused_parameters=find_unused)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        self.mode, self.steps = mode, 0
        self.losses: list[torch.Tensor] = []

    def backward(self, x: torch.Tensor, **kwargs: Any) -> None:
        loss = self.ddp(x, **kwargs)["out"].square().mean()
        loss.backward()
        self.losses.append(loss.detach())

    def step(self, set_to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.boundary()

    def boundary(self) -> None:
        self.steps += 1
        if self.steps == 1:
            self.graphs.watch()
        elif self.steps <= 1 + WATCHED:
            self.graphs.step()
        if self.steps == 1 + WATCHED:
            self.graphs.stop_watching()
            self.before = [tensor.clone() for tensor in self.ddp.module.state_dict().values()]
            self.random = torch.get_rng_state()
            for parameter in self.ddp.parameters():  # the reducer has held these nodes since it was built
                node_of(parameter).metadata.update(ON_THE_DEFAULT_STREAM)
            self.graphs.set_mode(self.mode)

    def left_a_trace(self) -> bool:
        """Whether the capture has moved a buffer or the random numbers. To be asked at once."""
        after = self.ddp.module.state_dict().values()
        same = all(torch.equal(one, other) for one, other in zip(self.before, after, strict=True))
        return not same or not torch.equal(self.random, torch.get_rng_state())


Loop = Callable[[Run, int], None]


def plain(run: Run, rank: int) -> None:
    for x in batches(rank):
        run.backward(x)
        run.step()


def zeroed_in_place(run: Run, rank: int) -> None:
    for x in batches(rank):
        run.backward(x)
        run.step(set_to_none=False)


def accumulates(run: Run, rank: int) -> None:
    """From the sixth step on, under no_sync but for the last."""
    for number, x in enumerate(batches(rank)):
        if number > 5:
            with run.ddp.no_sync():
                run.backward(x * 2)
                run.backward(x * 3)
        run.backward(x)
        run.step(set_to_none=number % 2 == 0)


def reduces_each_micro_batch(run: Run, rank: int) -> None:
    for number, x in enumerate(batches(rank)):
        if number > 5:
            run.backward(x * 2)
        run.backward(x)
        run.step()


def two_forwards(run: Run, rank: int) -> None:
    """Two forward passes before one backward, as for a pair of images."""
    for number, x in enumerate(batches(rank)):
        if number > 5:
            one, other = run.ddp(x)["out"], run.ddp(x.flip(1))["out"]
            (one * other).mean().backward()
        else:
            run.backward(x)
        run.step()


def forward_for_nothing(run: Run, rank: int) -> None:
    """A forward pass with gradients that is kept and never used."""
    kept = []
    for number, x in enumerate(batches(rank)):
        if number > 5:
            kept.append(run.ddp(x)["features"])
        run.backward(x)
        run.step()
    run.losses += [features.detach().sum() for features in kept]


def other_shapes(run: Run, rank: int) -> None:
    for number, x in enumerate(batches(rank)):
        run.backward(x[: 5 if number % 3 == 0 and number > 5 else 8])
        run.step()


def other_arguments(run: Run, rank: int) -> None:
    for number, x in enumerate(batches(rank)):
        run.backward(x, **({"scale": 0.5} if number > 5 and number % 2 else {}))
        run.step()


def evaluates(run: Run, rank: int) -> None:
    for x in batches(rank):
        run.ddp.eval()
        with torch.no_grad():
            run.losses.append(run.ddp(x)["out"].square().mean())
        run.ddp.train()
        run.backward(x)
        run.step()


def past_ddp(run: Run, rank: int) -> None:
    """The module itself is called, around DDP: nobody copies its gradients out, and they are summed up."""
    for number, x in enumerate(batches(rank)):
        if number > 5:
            run.ddp.module(x * 2)["out"].square().mean().backward()
            run.ddp.module(x * 3)["out"].square().mean().backward()
        run.backward(x)
        run.step()


def moves_parameters(run: Run, rank: int) -> None:
    """Weights of another place, as an average swapped in and out for a while."""
    for number, x in enumerate(batches(rank)):
        if number == 7:
            for p in run.ddp.module.head.parameters():
                p.data = p.data.clone()
        run.backward(x)
        run.step()


def freezes(run: Run, rank: int) -> None:
    """BatchNorm in evaluation mode from some step on, inside a model that trains."""
    for number, x in enumerate(batches(rank)):
        if number == 7:
            run.ddp.module.blocks[1].inner[1].eval()
        run.backward(x)
        run.step()


def adds_a_hook(run: Run, rank: int) -> None:
    for number, x in enumerate(batches(rank)):
        if number == 7:
            run.ddp.module.head.register_forward_hook(lambda _module, _args, out: out * 1.5)
        run.backward(x)
        run.step()


def keeps_outputs(run: Run, rank: int) -> None:
    kept = []
    for x in batches(rank):
        out = run.ddp(x)["out"]
        kept.append(out.detach())
        out.square().mean().backward()
        run.step()
    run.losses += [out.sum() for out in kept]


def changes_a_setting(run: Run, rank: int) -> None:
    """A number that a layer reads in Python, as of a script that raises dropout from epoch to epoch."""
    for number, x in enumerate(batches(rank)):
        if number == 7:
            run.ddp.module.blocks[1].inner[1].momentum = 0.5
        run.backward(x)
        run.step()


def changes_its_configuration(run: Run, rank: int) -> None:
    """A number in an object that all blocks share, as of a script that cools a temperature there."""
    for number, x in enumerate(batches(rank)):
        if number == 7:
            run.ddp.module.config.gain = 0.5
        run.backward(x)
        run.step()


def changes_a_number_in_a_list(run: Run, rank: int) -> None:
    """As of the weights of several losses. What the script appends to such a list changes nothing."""
    for number, x in enumerate(batches(rank)):
        if number == 7:
            run.ddp.module.gains[0] = 0.5
        run.backward(x)
        run.step()
        run.ddp.module.gains.append(float(number))


def has_another_configuration(run: Run, rank: int) -> None:
    for number, x in enumerate(batches(rank)):
        if number == 7:
            run.ddp.module.blocks[1].config = SimpleNamespace(gain=0.5)
        run.backward(x)
        run.step()


def replaces_a_buffer(run: Run, rank: int) -> None:
    for number, x in enumerate(batches(rank)):
        if number == 7:
            norm = run.ddp.module.blocks[1].inner[1]
            norm.running_mean = torch.zeros_like(norm.running_mean)
        run.backward(x)
        run.step()


def replaces_a_layer(run: Run, rank: int) -> None:
    """One without parameters, as of a script that has another dropout or activation from some epoch on."""
    for number, x in enumerate(batches(rank)):
        if number == 7:
            run.ddp.module.blocks[1].inner[2] = nn.ReLU()
        run.backward(x)
        run.step()


def appends_a_layer(run: Run, rank: int) -> None:
    for number, x in enumerate(batches(rank)):
        if number == 7:
            run.ddp.module.blocks[1].inner.append(nn.Sigmoid())
        run.backward(x)
        run.step()


def other_weights(run: Run, rank: int) -> None:
    """Passes with weights made of the model's own, as in meta-learning, or with noise on them."""
    for number, x in enumerate(batches(rank)):
        if number < 7:
            run.backward(x)
        else:
            weights = {name: p * 0.9 for name, p in run.ddp.named_parameters()}
            loss = torch.func.functional_call(run.ddp, weights, (x,))["out"].square().mean()
            loss.backward()
            run.losses.append(loss.detach())
        run.step()


def averages_weights(run: Run, rank: int) -> None:
    """A deep copy and a pickle, made while graphs stand, compute by themselves."""
    average = None
    for number, x in enumerate(batches(rank)):
        run.backward(x)
        run.step()
        if number == 7:
            average = copy.deepcopy(run.ddp.module)
            file = io.BytesIO()
            torch.save(run.ddp.module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for model in (average, loaded):
        model.train()
        run.losses.append(model(torch.ones(8, WIDTH))["out"].square().mean().detach())
    assert not any("forward" in vars(m) for m in (*average.modules(), *loaded.modules()))


def under_autocast(run: Run, rank: int) -> None:
    """Graphs answer where the script calls under autocast, as it did in the step that was watched."""
    for x in batches(rank):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run.backward(x)
        run.step()


def autocast_turned_off(run: Run, rank: int) -> None:
    """As scripts do that take autocast from an option: what it would compute in has no effect."""
    for x in batches(rank):
        with torch.autocast("cpu", dtype=torch.float16, enabled=False):
            run.backward(x)
        run.step()


LOOPS = (plain, zeroed_in_place, accumulates, reduces_each_micro_batch, two_forwards, forward_for_nothing,
         other_shapes, other_arguments, evaluates, past_ddp, moves_parameters, freezes, adds_a_hook,
         changes_a_setting, changes_its_configuration, changes_a_number_in_a_list, has_another_configuration,
         replaces_a_buffer, replaces_a_layer, appends_a_layer, other_weights, keeps_outputs, averages_weights,
         under_autocast, autocast_turned_off)  # fmt: skip
SERVED = {  # forward passes of the whole model that a graph can serve, of the 8 steps after capture; the others cannot
    "accumulates": 8, "reduces_each_micro_batch": 14, "two_forwards": 8, "forward_for_nothing": 3, "other_shapes": 6,
    "other_arguments": 5, "past_ddp": 8, "moves_parameters": 3, "freezes": 3, "adds_a_hook": 3,
    "changes_a_setting": 3, "changes_its_configuration": 3, "changes_a_number_in_a_list": 3,
    "has_another_configuration": 3, "replaces_a_buffer": 3, "replaces_a_layer": 3, "appends_a_layer": 3,
    "other_weights": 3,
}  # fmt: skip


def train(loop: Loop, mode: str, rank: int) -> dict[str, Any]:
    run = Run(mode)
    loop(run, rank)
    values = [*run.ddp.module.state_dict().values(), *run.losses]
    return {"values": [value.clone() for value in values], "replayed": run.graphs.replayed, "why": run.graphs.why_not}


def as_written_by_ddp(rank: int) -> int:
    """A model without buckets that copy its gradients out: forward passes that a graph has served."""
    run = Run("model", bucket_view=False)
    plain(run, rank)
    return run.graphs.replayed


def leaves_out_a_block(rank: int) -> dict[str, list[torch.Tensor]]:
    """In a pass that reduces; the next ones, under no_sync, have it again, and nobody copies its gradients out."""
    found = {}
    for mode in ("", "blocks"):
        run = Run(mode, find_unused=True)
        for number, x in enumerate(batches(rank)):
            if number > 5:
                run.ddp.module.left_out = 1
                run.backward(x)
                run.ddp.module.left_out = -1
                with run.ddp.no_sync():
                    run.backward(x * 2)
                    run.backward(x * 3)
            run.backward(x)
            run.step()
        found[mode] = [*run.ddp.module.state_dict().values(), *run.losses]
    return found


def beside_another(rank: int) -> int:
    """Another DDP model's forward pass arms no graph of this one, whose module is then called around DDP."""
    run = Run("model")
    plain(run, rank)
    before = run.graphs.replayed
    other = DDP(nn.Linear(WIDTH, WIDTH), gradient_as_bucket_view=True)
    for x in batches(rank, steps=3):
        run.ddp.module(other(x).detach())["out"].square().mean().backward()
    return run.graphs.replayed - before


def ignored(rank: int) -> dict[str, str]:
    """Why no graph is captured of a model of which DDP ignores a parameter."""
    patch = Patch()
    patch.install()
    model = nn.Linear(WIDTH, WIDTH)
    model._ddp_params_and_buffers_to_ignore = ["bias"]
    ddp, graphs = DDP(model, gradient_as_bucket_view=True), Graphs(patch.alive, reduces, static_callables)
    graphs.watch()
    ddp(next(batches(rank))).sum().backward()
    graphs.step()
    graphs.stop_watching()
    return graphs.why_not


def turning(rank: int) -> dict[str, Any]:
    """On, off, the other kind and on again, in the middle of a training."""
    run, served = Run("model"), []
    modes = iter(["", "", "blocks", "blocks", "model", "", "model", ""])
    for number, x in enumerate(batches(rank)):
        run.backward(x)
        run.step()
        if number == WATCHED:
            trace = run.left_a_trace()
        if number > WATCHED:
            served.append(run.graphs.replayed)
            run.graphs.set_mode(next(modes))
    stands = [name for name, m in run.ddp.module.named_modules() if "forward" in vars(m)]
    return {"values": list(run.ddp.module.state_dict().values()), "served": served, "stands": stands, "trace": trace}


def failing(rank: int) -> dict[str, Any]:
    """A capture that raises, and one whose graph computes something else."""

    def raises(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    def wrong(*given: Any, **options: Any) -> Any:
        calls = static_callables(*given, **options)
        return [lambda *x, right=right: {k: v * 1.01 for k, v in right(*x).items()} for right in calls]

    said = []
    for make in (raises, wrong):
        run = Run("")
        run.graphs._make = make
        for x in batches(rank, steps=5):
            run.backward(x)
            run.step()
        try:
            run.graphs.set_mode("model")
        except RuntimeError as why:
            said.append(str(why))
        run.backward(next(batches(rank)))
        said.append([name for name, m in run.ddp.module.named_modules() if "forward" in vars(m)])
    return {"said": said}


def two_models(rank: int, mode: str) -> dict[str, Any]:
    """Two models in a step, whose backward passes come in the order of the forward ones."""
    torch.manual_seed(3)
    patch = Patch()
    graphs = Graphs(patch.alive, reduces, static_callables)
    patch.events = graphs
    patch.install()
    models = [DDP(Model(), gradient_as_bucket_view=True) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for number, x in enumerate(batches(rank)):
        if number == 1:
            graphs.watch()
        losses = [model(x)["out"].square().mean() for model in models]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number in (1, 2, 3):
            graphs.step()
        if number == 3:
            graphs.stop_watching()
            graphs.set_mode(mode)
    values = [value for model in models for value in model.module.state_dict().values()]
    return {"values": values, "replayed": graphs.replayed}


def retained(rank: int, mode: str) -> list[str]:
    """A second backward pass of a pass that DDP has reduced: at once, after another forward pass, and after it all."""
    said = []
    for between in (0, 1):
        run = Run(mode)
        for x in batches(rank, steps=6):
            run.backward(x)
            run.step()
        loss = run.ddp(x)["out"].square().mean()
        loss.backward(retain_graph=True)
        for _ in range(between):
            run.backward(x)
        try:
            loss.backward()
            said.append("")
        except JobStops as why:
            said.append(str(why))
    return said


def dropped(rank: int) -> bool:
    """Whether a model is freed that the script has dropped, once it trains another one."""
    run = Run("model")
    plain(run, rank)
    model = weakref.ref(run.ddp.module)
    del run.ddp, run.optimizer, run.before
    gc.collect()  # a DDP object may be part of a cycle
    other = DDP(Model(), gradient_as_bucket_view=True)
    run.graphs.forget_dropped(other.module)
    gc.collect()
    return model() is None


def checks(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for loop in LOOPS:
        found[loop.__name__] = {mode: train(loop, mode, rank) for mode in ("", "model", "blocks")}
    found["no bucket view"] = as_written_by_ddp(rank)
    found["beside another"] = beside_another(rank)
    found["left out"] = leaves_out_a_block(rank)
    found["dropped"] = dropped(rank)
    found["ignored"] = ignored(rank)
    found["turning"] = turning(rank)
    found["failing"] = failing(rank)
    found["two models"] = {mode: two_models(rank, mode) for mode in ("", "model", "blocks")}
    found["retained"] = {mode: retained(rank, mode) for mode in ("", "model", "blocks")}
    return found
