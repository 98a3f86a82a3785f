"""What each rank of test_compiled.py does, with real DDP and the real torch.compile around a backend of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from static_backend import StaticBackend
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.effects.compiling import Compiling

WIDTH, STEPS = 512, 8  # one MiB of gradients a layer
WHOLE = Configuration({"optimize_ddp": False, "bucket_cap_mb": 8.0})
PIECES = Configuration({"optimize_ddp": True, "bucket_cap_mb": 2.0})
REPLAYED = Configuration({"gradient_as_bucket_view": True, "cuda_graphs": "reduce-overhead"})


def checks(rank: int) -> dict[str, Any]:
    """All of them in one process: torch.compile takes long to be imported. What is compiled needs no other rank."""
    found = {"ways": ways(), "traced": traced()}
    return {**found, "pieces": pieces(rank), "replayed": replayed(rank), "refused": refused(rank)}


def ways() -> dict[str, tuple[bool, bool]]:
    """How torch.compile has been told of a model, as `is_compiled` and `is_compiled_inside` see it."""
    patch = Patch()
    patch.install()
    part = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend="eager"))
    models = {
        "plain": DDP(nn.Linear(4, 4)),
        "inside": DDP(torch.compile(nn.Linear(4, 4), backend="eager")),
        "a part": DDP(part),
        "around": DDP(nn.Linear(4, 4)),
        "method": DDP(nn.Linear(4, 4)),
    }
    around = torch.compile(models["around"], backend="eager")
    models["method"].compile(backend="eager")
    around(torch.ones(1, 4))
    return {name: (w.is_compiled, w.is_compiled_inside) for name, w in zip(models, patch.alive(), strict=True)}


class _Handler(DdpEvents):
    def returned(self, ddp: DDP, what: Any) -> Any:
        return what + 0


def traced() -> list[str]:
    """The files of which torch.compile traces something, where a script compiles the DDP object itself."""
    patch = Patch()
    patch.events = _Handler()
    patch.install()
    torch.compiler.reset()  # what was traced before is not traced again
    files: list[str] = []
    hook = torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _: files.append(code.co_filename))
    model = torch.compile(DDP(nn.Linear(4, 4)), backend="eager")
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    hook.remove()
    return files


class _Events(DdpEvents):
    def __init__(self, compiling: Compiling) -> None:
        self._replays = compiling.replays

    def called(self, ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._replays.called(ddp, args, kwargs)

    def returned(self, ddp: DDP, what: Any) -> Any:
        return self._replays.returned(ddp, what)


class Run:
    """A training; `turn` between its steps."""

    def __init__(self, backend: Any = None, count: int = 2, **arguments: Any) -> None:
        torch.manual_seed(3)
        self.patch = Patch()
        self.compiling = Compiling(self.patch.alive)
        self.patch.events = _Events(self.compiling)
        self.patch.install()
        layers = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        net = nn.Sequential(*layers[:-1], nn.BatchNorm1d(WIDTH))
        self.ddp = DDP(torch.compile(net, backend=backend) if backend else net, **arguments)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        self.kept: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []

    def watch(self, rank: int, steps: int = 3, forwards: int = 1) -> str:
        """Some steps of the script; then why nothing may be replayed."""
        self.compiling.replays.watch()
        for inputs in batches(rank, steps):
            for _ in range(forwards):
                self.ddp(inputs).square().mean().backward()
            self.end_of_step()
            self.compiling.replays.step()
        self.compiling.replays.stop_watching()
        self.compiling.begin()
        return self.compiling.replays.why_not["reduce-overhead"]

    def end_of_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, configuration: Configuration) -> None:
        for wrapped in self.patch.alive():
            wrapped.rebuild(configuration, start_step=0)
        self.compiling.apply(configuration)

    def train(self, rank: int, steps: int = STEPS) -> None:
        """The script keeps what its model returns."""
        for inputs in batches(rank, steps):
            returned = self.ddp(inputs)
            self.kept.append(returned)
            self.copies.append(returned.detach().clone())
            returned.square().mean().backward()
            self.end_of_step()

    @property
    def state(self) -> dict[str, torch.Tensor]:
        plain = {name.replace("_orig_mod.", ""): t.clone() for name, t in self.ddp.module.state_dict().items()}
        return {"numbers": torch.get_rng_state(), **plain}


def batches(rank: int, steps: int) -> Iterator[torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(8, WIDTH, generator=source)


def pieces(rank: int) -> dict[str, Any]:
    """Graphs compiled after each turn, and what training gave, beside the same turns without torch.compile."""
    found: dict[str, Any] = {"graphs": [], "counted": [], "states": [], "called_back": 0}

    def script_counts(*_: object) -> None:
        found["called_back"] += 1

    for backend in (StaticBackend(), None):
        run = Run(backend, count=4)
        run.compiling.begin()
        if backend:
            torch._dynamo.callback.on_compile_start(script_counts)
        for configuration in (AS_WRITTEN, WHOLE, PIECES, PIECES.with_values(hook="bf16"), AS_WRITTEN):
            before = (len(backend.sizes), run.compiling.compilations) if backend else (0, 0)
            run.turn(configuration)
            run.train(rank)
            if backend:
                found["graphs"].append(len(backend.sizes) - before[0])
                found["counted"].append(run.compiling.compilations - before[1])
        found["states"].append(run.state)
        torch.compiler.reset()
    return found


def replayed(rank: int) -> dict[str, Any]:
    """Graphs replayed in a script that keeps what its model returns, and the same training without torch.compile."""
    backend = StaticBackend()
    run, plain = Run(backend, gradient_as_bucket_view=True), Run(gradient_as_bucket_view=True)
    found: dict[str, Any] = {"why_not": run.watch(rank)}
    before, compiled = run.state, len(backend.compiled)
    run.turn(REPLAYED)
    found["left_a_trace"] = differing(run.state, before)
    found["by_turning"] = backend.compiled[compiled:]
    compiled = len(backend.compiled)
    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(3))
    found["elsewhere"] = backend.compiled[compiled:]
    compiled = len(backend.compiled)
    run.train(rank)
    found["by_training"] = backend.compiled[compiled:]
    found["overwritten"] = any(not torch.equal(one, copy) for one, copy in zip(run.kept, run.copies, strict=True))
    run.turn(AS_WRITTEN)
    run.train(rank)
    found["taken_back"] = backend.compiled[compiled:]
    for steps in (3, STEPS, STEPS):
        plain.train(rank, steps)
    found["states"] = [run.state, plain.state]
    return found


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def refused(rank: int) -> dict[str, Any]:
    """Where graphs are not to be replayed, and why."""
    found: dict[str, Any] = {}
    wrong = StaticBackend(wrong_by=0.01)
    run = Run(wrong, gradient_as_bucket_view=True)
    run.watch(rank)
    before, compiled = run.state, len(wrong.compiled)
    try:
        run.turn(REPLAYED)
    except RuntimeError as why:
        found["wrong"] = str(why)
    found["left_a_trace"] = differing(run.state, before)
    run.turn(AS_WRITTEN)
    run.train(rank)
    found["compiled"] = wrong.compiled[compiled:]
    around = Run(count=1)
    around.ddp = torch.compile(around.ddp, backend="eager")
    with torch.compiler.set_stance("force_eager"):  # the reasons are known without what is compiled
        found["twice"] = Run(StaticBackend(), count=1).watch(rank, forwards=2)
        found["around"] = around.watch(rank)
    return found
