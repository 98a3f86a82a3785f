"""What each rank of test_fitting.py does: short trainings under a recipe, each in a fork with a group of its own.

    python fitting_checks.py FOLDER RANK

Every case trains as the real job would, and leaves its parameters after each step, what it was told, and how DDP is
built in the end. `recipe = None` is the script alone: what a refused recipe must not change.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # else each fork would import it
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.knobs.ddp_arguments import GRADIENT_AS_BUCKET_VIEW
from autoddp.recipe import with_model
from autoddp.wire import WorkerConfig
from autoddp.worker.ddp.arguments import AVAILABLE_ARGUMENTS
from autoddp.worker.ddp.model import parameters_digest
from autoddp.worker.job import applying
from autoddp.worker.job.applying import start_applying

WORLD = 2
STEPS = 6
BATCH, FEATURES = 8, 16
FITS = [f"0: float32[{BATCH}, {FEATURES}]"]
OTHERS = [f"0: float32[{BATCH * 2}, {FEATURES}]"]
FREE = [f"0: float32[*, {FEATURES}]"]


@dataclass
class Case:
    """One training."""

    recipe: dict[str, Any] | None
    inputs: list[str] = field(default_factory=lambda: FITS)
    odd_rank: int | None = None
    """This rank alone gives its model one sample more."""
    alone: bool = False
    """Rank 0 alone runs training passes that nobody goes backward from, before the first step and after it."""
    micro_batches: int = 1
    clips: bool = False
    models: int = 1
    digests: str = ""
    """Of the recipe, where they are not the models' own."""
    started: int = 0
    """Ranks that the launcher says it has started; 0: it says nothing."""
    world: int = 0
    """Ranks that the recipe is for; 0: any number."""
    backend: str = "gloo"
    """Of the recipe."""
    restored: bool = False
    """The script trains what it has unpickled from its DDP objects."""
    late: bool = False
    """Two larger models are built and trained, one after the other, when the first has been."""
    joins: bool = False
    """Rank 1 has inputs for half of the steps, and DDP divides by the ranks that still have some."""
    no_sync: bool = False
    """All micro-batches of a step but the last are under `no_sync`."""
    looks: bool = False
    """The model is called once more, without gradients, before the backward pass of each micro-batch."""
    again: bool = False
    """Another object is built around the same parameters and gets other inputs; on rank 0 the first one stays alive."""
    is_named: bool = False
    """The user has named the recipe, so nothing is noted."""
    shares: bool = False
    """The model returns one of its parameters beside its output, and the last step has one micro-batch alone."""
    peeks: bool = False
    """Rank 0 alone runs a training pass before the backward pass of each micro-batch; the last step has one alone."""

    moves: bool = False
    """The script gives a weight another memory format after DDP was built."""
    groups: bool = False
    """The model has a `parameters` of its own, which gives groups for an optimizer."""
    compiles: bool = False
    """The script has torch.compile compile its models."""
    searches: bool = False
    """The script has DDP look for unused parameters."""
    is_static: bool = False
    """The script has DDP take its graph as static."""
    tuned_so: bool = False
    """The script had DDP look for unused parameters where the recipe was made."""


BF16 = {"hook": "bf16"}
TWO = {"accumulate_steps": 2}
HAS_VIEWS = GRADIENT_AS_BUCKET_VIEW.name in AVAILABLE_ARGUMENTS
CAPS = {"bucket_cap_mb": 0.5, **({GRADIENT_AS_BUCKET_VIEW.name: True} if HAS_VIEWS else {})}
CASES = {
    "plain": Case(None),
    "plain, odd": Case(None, odd_rank=1),
    "plain, clips": Case(None, clips=True),
    "plain, micro-batches": Case(None, micro_batches=2),
    "plain, no_sync": Case(None, micro_batches=2, no_sync=True),
    "plain, two": Case(None, models=2),
    "plain, joins": Case(None, joins=True),
    "plain, moves": Case(None, moves=True),
    "hook refused, moves": Case(BF16, moves=True),
    "caps refused, moves": Case(CAPS, moves=True),
    "hook fits": Case(BF16),
    "hook, joins": Case(BF16, joins=True),
    "hook, free batch": Case(BF16, inputs=FREE, odd_rank=1),
    "hook, nothing known": Case(BF16, inputs=[]),
    "hook refused": Case(BF16, inputs=OTHERS),
    "hook refused by one": Case(BF16, odd_rank=1),
    "hook refused, alone": Case(BF16, inputs=OTHERS, alone=True),
    "hook fits, alone": Case(BF16, inputs=FREE, alone=True),
    "hook, again with other inputs": Case(BF16, again=True),
    "named hook, again with other inputs": Case(BF16, again=True, is_named=True),
    "powersgd refused": Case({"hook": "powersgd", "powersgd_rank": 1, "powersgd_start_step": 0}, inputs=OTHERS),
    "accumulation fits": Case(TWO),
    "accumulation fits, alone": Case(TWO, inputs=FREE, alone=True),
    "accumulation refused": Case(TWO, inputs=OTHERS),
    "accumulation refused, clips": Case(TWO, inputs=OTHERS, clips=True),
    "accumulation and hook refused": Case({**TWO, **BF16}, inputs=OTHERS, clips=True),
    "implicit_no_sync refused": Case({"defer_reductions": 2}, inputs=OTHERS, micro_batches=2),
    "implicit_no_sync fits, alone": Case({"defer_reductions": 2}, inputs=FREE, alone=True, micro_batches=2),
    "implicit_no_sync fits, looks": Case({"defer_reductions": 2}, looks=True, micro_batches=2),
    "implicit_no_sync, fewer passes": Case({"defer_reductions": 4}, micro_batches=2),
    "implicit_no_sync, no_sync": Case({"defer_reductions": 2}, micro_batches=2, no_sync=True),
    "plain, shares": Case(None, shares=True, micro_batches=2),
    "implicit_no_sync fits, shares": Case({"defer_reductions": 2}, shares=True, micro_batches=2),
    "plain, peeks": Case(None, peeks=True, micro_batches=2),
    "implicit_no_sync fits, peeks": Case({"defer_reductions": 2}, inputs=FREE, peeks=True, micro_batches=2),
    "caps fit": Case(CAPS),
    "caps fit, groups": Case(CAPS, groups=True),
    "caps fit, compiled": Case(CAPS, compiles=True),
    "hook fits, groups": Case(BF16, groups=True),
    "caps refused, groups": Case(CAPS, inputs=OTHERS, groups=True),
    "caps refused": Case(CAPS, inputs=OTHERS),
    "static refused": Case({"static_graph": True}, inputs=OTHERS),
    "static graph, searches": Case({"static_graph": True}, searches=True),
    "static graph, searches as tuned": Case({"static_graph": True}, searches=True, tuned_so=True),
    "static graph, searches, static itself": Case({"static_graph": True}, searches=True, is_static=True),
    "static graph, no_sync": Case({"static_graph": True}, micro_batches=2, no_sync=True),
    "other parameters": Case(BF16, digests="0123456789abcdef"),
    "started elsewhere": Case({**BF16, **CAPS}, started=1),
    "other ranks": Case({**BF16, **CAPS}, started=WORLD, world=WORLD + 1),
    "as many ranks": Case(BF16, started=WORLD, world=WORLD),
    "another backend": Case({**BF16, **CAPS}, backend="nccl"),
    "one of two refused": Case(BF16, models=2, inputs=[*with_model(FITS, 0, 2), *with_model(OTHERS, 1, 2)]),
    "nothing to launch, refused": Case({}, inputs=OTHERS),
    "hook, restored": Case({**BF16, **CAPS}, restored=True),
    "static graph, restored": Case({"static_graph": True}, restored=True),
    "accumulation, restored": Case(TWO, restored=True),
    "implicit_no_sync, restored": Case({"defer_reductions": 2}, restored=True, micro_batches=2),
    "a later model": Case(BF16, late=True),
}


class Network(nn.Sequential):
    def __init__(self, width: int = 24) -> None:
        super().__init__(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 4))


class Sharing(Network):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self[2].bias


class Grouped(Network):
    def parameters(self, recurse: bool = True) -> Any:
        return [{"params": list(layer.parameters())} for layer in self]


def order_of(case: Case, folder: Path, name: str) -> WorkerConfig:
    digests = case.digests or "+".join(parameters_digest(Network(24 + n)) for n in range(case.models))
    return WorkerConfig(
        configuration=Configuration(case.recipe),
        parameters_digest=digests,
        inputs=case.inputs,
        backend=case.backend,
        static_graph=case.tuned_so,
        recipe="proj.train.autoddp.toml",
        note="" if case.is_named else str(folder / f"{name}.unfit"),
        noted="# a note\n",
        variables={"OMP_NUM_THREADS": "1"},
        world=case.world,
    )


def train(case: Case, rank: int) -> dict[str, Any]:
    torch.manual_seed(7)
    kind = Sharing if case.shares else Grouped if case.groups else Network
    networks = [kind(24 + n) for n in range(case.models)]
    wrap = partial(DDP, find_unused_parameters=case.searches, static_graph=case.is_static)
    models = [wrap(torch.compile(one, backend="eager") if case.compiles else one) for one in networks]
    built = models
    if case.restored:
        models = [pickle.loads(pickle.dumps(model)) for model in built]  # the first ones stay alive
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    if case.joins:
        with models[0].join(divide_by_initial_world_size=False):
            for step in range(STEPS if rank == 0 else STEPS // 2):
                one_step(case, rank, step, models[0], optimizers[0])
        return {"steps": [[p.detach().clone() for p in models[0].parameters()]], **how_built(models)}
    steps: list[list[torch.Tensor]] = []
    if case.moves:
        weight = models[0].module[0].weight
        weight.data = weight.data.t().contiguous().t()
    if case.alone and rank == 0:
        models[0](torch.zeros(1, FEATURES))
    for step in range(STEPS):
        is_short = step == STEPS - 1 and (case.shares or case.peeks)
        this = replace(case, micro_batches=1) if is_short else case
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            one_step(this, rank, step * 10 + number, model, optimizer)
        if case.alone and rank == 0:
            models[0](torch.zeros(1, FEATURES))
        steps.append([p.detach().clone() for model in models for p in model.parameters()])
    if case.late:
        for later in (DDP(Network(width)) for width in (99, 120)):
            for step in range(2):
                one_step(case, rank, step, later, torch.optim.SGD(later.parameters(), lr=0.1))
    if case.again:
        held, module = (models if rank == 0 else None), models[0].module
        models = built = [DDP(module)]
        del model
        gc.collect()  # rank 1 has no other object any more
        for step in range(2):
            one_step(replace(case, odd_rank=rank), rank, 100 + step, models[0], optimizers[0])
            steps.append([p.detach().clone() for p in module.parameters()])
        del held
    return {"steps": steps, **how_built(models)}


def one_step(case: Case, rank: int, seed: int, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for micro in range(case.micro_batches):
        source = torch.Generator().manual_seed(1000 * seed + 10 * rank + micro)
        inputs = torch.randn(BATCH + (case.odd_rank == rank), FEATURES, generator=source)
        is_local = case.no_sync and micro < case.micro_batches - 1
        with model.no_sync() if is_local else contextlib.nullcontext():
            one_micro_batch(case, rank, model, inputs)
    if case.clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def one_micro_batch(case: Case, rank: int, model: DDP, inputs: torch.Tensor) -> None:
    outputs = model(inputs)
    scores, shared = outputs if case.shares else (outputs, torch.zeros(1))
    loss = nn.functional.cross_entropy(scores, inputs[:, :4].argmax(1)) + shared.square().mean()
    if case.looks:
        with torch.no_grad():
            model(inputs)
    if case.peeks and rank == 0:
        model(torch.zeros(1, FEATURES))
    loss.backward()


def how_built(models: Sequence[DDP]) -> dict[str, Any]:
    return {
        "views": [model.gradient_as_bucket_view for model in models],
        "static": [model.static_graph for model in models],
        "searches": [model.find_unused_parameters for model in models],
        "hooks": [len(getattr(model, "_comm_hooks", None) or []) for model in models],
    }


def in_a_fork(work: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(child, 0)


def one_case(name: str, folder: Path, rank: int) -> None:
    case, told = CASES[name], []
    applying._say = lambda text: told.append(text)
    if case.started:
        os.environ["WORLD_SIZE"] = str(case.started)
    if case.recipe is not None:
        start_applying(order_of(case, folder, name))
    dist.init_process_group(
        "gloo", f"file://{folder}/store {name}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    found = train(case, rank)
    torch.save({**found, "told": told}, folder / f"{name} {rank}.pt")
    dist.barrier()


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    for name in CASES:
        in_a_fork(lambda name=name: one_case(name, folder, rank))


if __name__ == "__main__":
    main()
