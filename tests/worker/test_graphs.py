"""CUDA graphs' logic without a GPU: real DDP on gloo ranks, torch's capture replaced by one with the same dangers."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from graph_checks import LOOPS, SERVED, STEPS, WATCHED, Block, Model, checks
from on_ranks import on_ranks
from static_graphs import static_callables
from torch import nn

from autoddp.knobs import Configuration
from autoddp.knobs.ddp_arguments import GRADIENT_AS_BUCKET_VIEW
from autoddp.worker.ddp.arguments import AVAILABLE_ARGUMENTS
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.graphs import Graphs, GraphsInTheJob
from autoddp.worker.graphs.capture import Sample, capture
from autoddp.worker.graphs.observed_calls import Watching, blocks_of
from autoddp.worker.graphs.replay import Replay, SharedMemory
from autoddp.worker.graphs.signature import signature_of

LOOP_NAMES = [loop.__name__ for loop in LOOPS]
AFTER = STEPS - WATCHED - 1


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """One: a graph needs no other rank. Under --whole two."""
    if GRADIENT_AS_BUCKET_VIEW.name not in AVAILABLE_ARGUMENTS:
        pytest.skip("graphs need gradient_as_bucket_view, which this version of torch is not given")
    world_size = 2 if request.config.getoption("--whole") else 1
    return on_ranks(world_size, checks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("loop", LOOP_NAMES)
@pytest.mark.parametrize("mode", ["model", "blocks"])
def test_trained_with_graphs_as_without(ranks: list[dict[str, Any]], loop: str, mode: str) -> None:
    for found in (rank[loop] for rank in ranks):
        assert found[mode]["why"] == {"model": "", "blocks": ""}
        for one, other in zip(found[mode]["values"], found[""]["values"], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("loop", LOOP_NAMES)
def test_graphs_serve_what_they_can(ranks: list[dict[str, Any]], loop: str) -> None:
    assert [rank[loop]["model"]["replayed"] for rank in ranks] == [SERVED.get(loop, AFTER)] * len(ranks)
    assert ranks[0][loop][""]["replayed"] == 0


def test_the_stand_in_for_capture_has_the_dangers_of_one() -> None:
    """Two forward passes before one backward: the second overwrites what the first has handed out."""
    (graphed,) = static_callables((nn.Linear(2, 2),), ((torch.zeros(1, 2),),))
    first = graphed(torch.ones(1, 2))
    before = first.clone()
    graphed(torch.full((1, 2), 5.0))
    assert not torch.equal(first, before)


def test_the_stand_in_shares_memory_as_torch_does() -> None:
    """Captured first and second; the first one's backward pass spoils what the second one's reads, not the reverse."""
    for order, right in (((1, 0), [True, True]), ((0, 1), [True, False]), ((1, 1), [True, False])):
        layers = (nn.Linear(2, 2), nn.Linear(2, 2))
        calls = static_callables(layers, ((torch.zeros(1, 2),), (torch.zeros(1, 2),)), num_warmup_iters=0)
        outputs = [call(torch.ones(1, 2)) for call in calls]
        found = []
        for place in order:
            weight = layers[place].weight
            (gradient,) = torch.autograd.grad(outputs[place].sum(), weight, retain_graph=True)
            found.append(torch.equal(gradient, torch.ones(2, 2)))
        assert found == right, order


@pytest.mark.parametrize("mode", ["model", "blocks"])
def test_several_models_do_not_share_memory(ranks: list[dict[str, Any]], mode: str) -> None:
    for found in (rank["two models"] for rank in ranks):
        assert found[mode]["replayed"] > 0
        for one, other in zip(found[mode]["values"], found[""]["values"], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["model", "blocks"])
def test_a_second_backward_pass_raises(ranks: list[dict[str, Any]], mode: str) -> None:
    for found in (rank["retained"] for rank in ranks):
        assert found[""] == ["", ""]
        assert all("a CUDA graph has overwritten" in why and "retain_graph=True" in why for why in found[mode])


def test_blocks_under_different_autocast_are_refused() -> None:
    class Mixed(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            for number, block in enumerate(self.blocks):
                with torch.autocast("cpu", torch.bfloat16, enabled=number > 0):
                    x = block(x).float()
            return x

    model = Mixed()
    given = [((torch.ones(3, 12),),)] * 2
    with torch.autocast("cpu", torch.bfloat16):
        assert watched(model, given, "blocks") == "its blocks are called under different autocast, or other settings"
        assert watched(model, given, "model") == ""


@pytest.mark.parametrize("case", ["no bucket view", "beside another"])
def test_no_graph_serves_where_gradients_are_not_copied_out(ranks: list[dict[str, Any]], case: str) -> None:
    assert [rank[case] for rank in ranks] == [0] * len(ranks)


def test_a_block_that_was_not_called_serves_no_other_pass(ranks: list[dict[str, Any]]) -> None:
    """Else gradients of passes that do not reduce would lie in the graph's buffers, that the next replay overwrites."""
    for found in (rank["left out"] for rank in ranks):
        for one, other in zip(found["blocks"], found[""], strict=True):
            assert torch.equal(one, other)


def test_no_graph_where_ddp_ignores_parameters(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["ignored"] for rank in ranks):
        assert set(found.values()) == {"the script tells DDP to ignore some of its parameters"}


def test_a_model_that_the_script_has_dropped_is_freed_with_its_graph(ranks: list[dict[str, Any]]) -> None:
    assert [rank["dropped"] for rank in ranks] == [True] * len(ranks)


def test_turned_on_and_off_between_steps(ranks: list[dict[str, Any]]) -> None:
    for found, plain in ((rank["turning"], rank["plain"][""]) for rank in ranks):
        for one, other in zip(found["values"], plain["values"], strict=False):
            assert torch.equal(one, other)
        assert found["served"] == [1, 1, 1, 3, 6, 1, 1, 2]
        assert found["stands"] == []
        assert not found["trace"]


def test_a_graph_that_fails_or_errs_is_not_used(ranks: list[dict[str, Any]]) -> None:
    for said in (rank["failing"]["said"] for rank in ranks):
        assert said == [
            "operation not permitted when stream is capturing",
            [],
            "the graph of Model does not give what the module gives",
            [],
        ]


class Silent(Graphs):
    def apply(self, configuration: Configuration) -> None:
        raise AssertionError


def test_a_capture_that_fails_without_a_word_does_not_end_the_job() -> None:
    said: list[str] = []
    asked = Configuration({GRADIENT_AS_BUCKET_VIEW.name: True, "cuda_graphs": "model"})
    graphs, switch = Silent(list, lambda ddp: True), ReductionSwitch(lambda ddp: None)
    job = GraphsInTheJob(graphs, list, switch, asked, said.append)
    for _ in range(5):
        job._on_step()
    assert said == ["without CUDA graphs, as written: AssertionError"]


def watched(model: nn.Module, inputs: list[tuple[Any, ...]], mode: str = "model") -> str:
    watching = Watching([model])
    for given in inputs:
        for call in given:
            model(*call)
        watching.step()
    watching.stop()
    assert not any("forward" in vars(m) for m in model.modules() if isinstance(m, (Model, Block)))
    return watching.why_not(mode)


class Odd(nn.Module):
    def __init__(self, returns: Any = None) -> None:
        super().__init__()
        self.layer, self.returns = nn.Linear(2, 2), returns

    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        return self.layer(x) if self.returns is None else self.returns


class DropsLayers(nn.Module):
    """LayerDrop: a number decides in each step whether the layer runs."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(2, 2), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x if self.draw() < 0.05 else self.layer(x)
        return y


class Assigns(nn.Module):
    """Keeps a mean of its outputs by assigning it, and a loss for the script to read."""

    def __init__(self, keeps_loss: bool) -> None:
        super().__init__()
        self.layer, self.keeps_loss, self.loss = nn.Linear(2, 2), keeps_loss, None
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        if self.keeps_loss:
            self.loss = self.layer.weight.square().sum()
        else:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y


class Appends(nn.Module):
    """Leaves a loss in a list, from which the script adds all up, and which it then empties."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.losses = nn.Linear(2, 2), [torch.zeros(())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.append(self.layer.weight.square().sum())
        y: torch.Tensor = self.layer(x)
        return y


X = torch.ones(3, 2)


@pytest.mark.parametrize("what", ["mean", "loss"])
def test_a_module_that_sets_its_own_attributes_is_not_captured(what: str) -> None:
    """After a capture the script would read what the capture has left there, and add a loss that trains nothing."""
    module = Assigns(keeps_loss=what == "loss")
    before, content = module.mean, module.mean.clone()
    signature, tensors = signature_of((X,), {})
    with pytest.raises(RuntimeError, match=f"Assigns sets its {what} anew in each pass"):
        capture([Sample(module, module, signature, tensors, None)], static_callables)
    assert module.mean is before
    assert torch.equal(module.mean, content)
    assert module.loss is None


def test_a_module_that_fills_a_list_is_not_captured() -> None:
    """Its graph would fill none, and the script would train without that loss."""
    module = Appends()
    (before,) = module.losses
    signature, tensors = signature_of((X,), {})
    with pytest.raises(RuntimeError, match="Appends sets its losses anew in each pass"):
        capture([Sample(module, module, signature, tensors, None)], static_callables)
    assert len(module.losses) == 1
    assert module.losses[0] is before


class Counts(nn.Module):
    """Counts its passes in an object that it shares with the script, and computes by that."""

    def __init__(self, state: SimpleNamespace) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(2, 2), state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.passes += 1
        y: torch.Tensor = self.layer(x) / self.state.passes
        return y


def test_a_module_that_counts_in_an_object_is_not_captured() -> None:
    """Its graph would divide by one number for ever."""
    module = Counts(SimpleNamespace(passes=7))
    signature, tensors = signature_of((X,), {})
    with pytest.raises(RuntimeError, match="Counts changes passes in each pass"):
        capture([Sample(module, module, signature, tensors, None)], static_callables)
    assert module.state.passes == 7


HELD: Any = SimpleNamespace(losses=[], chances=None)
"""What a module finds in its file, and not in itself."""


class Elsewhere(nn.Module):
    """Leaves a loss in an object, or goes by a generator, of which it holds neither."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        if HELD.chances is None:
            HELD.losses.append(y.square().mean())
        elif HELD.chances.random() < 0.001:
            return y * 0
        return y


@pytest.mark.parametrize("kind", [None, random.Random, numpy.random.default_rng, numpy.random.RandomState])
def test_a_module_that_leaves_or_draws_something_elsewhere_is_not_captured(kind: Any) -> None:
    """Its graph would add no loss, or take the usual way for ever."""
    module, HELD.chances = Elsewhere(), kind and kind(0)
    signature, tensors = signature_of((X,), {})
    with pytest.raises(RuntimeError, match="a pass draws from a" if kind else "a pass leaves a result"):
        capture([Sample(module, module, signature, tensors, None)], static_callables)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_module_with_a_part_in_torchscript_is_known_again() -> None:
    """Its parameters are in a dictionary that has no `get`."""
    module = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    signature, tensors = signature_of((X,), {})
    replay = Replay(Sample(module, module, signature, tensors, None), module, SharedMemory(), 0)
    assert replay._state() == replay._captured
    module[1].weight.data = torch.zeros(2, 2)
    assert replay._state() != replay._captured


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="needs a setting for each operation: torch 2.9")
def test_a_script_may_choose_tf32_by_the_setting_of_an_operation() -> None:
    """torch raises an error from then on where its older settings are read, and a graph computes as it was captured."""
    module, matmul = Odd(), torch.backends.cuda.matmul
    signature, tensors = signature_of((X,), {})
    replay = Replay(Sample(module, module, signature, tensors, None), module, SharedMemory(), 0)
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        assert watched(module, [((X,),)] * 3) == ""
        assert replay._state() != replay._captured
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["random", "numpy"])
def test_a_module_that_draws_on_the_host_is_not_captured(draw: Callable[[], float]) -> None:
    """One pass with a graph and one without would both take the usual path, so comparing them shows nothing."""
    module = DropsLayers(draw)
    signature, tensors = signature_of((X,), {})
    states = random.getstate(), str(numpy.random.get_state())
    with pytest.raises(RuntimeError, match="draws random numbers on the host"):
        capture([Sample(module, module, signature, tensors, None)], static_callables)
    assert (random.getstate(), str(numpy.random.get_state())) == states


def test_no_state_of_a_generator_is_printed() -> None:
    """For each pass that took longer than the pass, and what prints may be a function of the script's."""

    def prints(_: object) -> str:
        raise AssertionError

    module = Odd()
    signature, tensors = signature_of((X,), {})
    with numpy.printoptions(formatter={"all": prints}):
        assert len(capture([Sample(module, module, signature, tensors, None)], static_callables)) == 1


@pytest.mark.parametrize(
    "generator", [torch.Generator(), random.Random(0), numpy.random.default_rng(0), numpy.random.RandomState(0)]
)
def test_a_module_with_a_generator_of_its_own_is_not_captured(generator: object) -> None:
    """The passes before a capture would draw from it, and the job would go on with other numbers than without."""
    module = Odd()
    module.layer.noise = generator  # type: ignore[assignment]
    assert watched(module, [((X,),)] * 3).startswith("Odd: it holds a random generator of its own")


@pytest.mark.parametrize(
    ("model", "inputs", "why"),
    [
        (Odd(), [((X,),)] * 3, ""),
        (Odd(), [((X, 2, ),)] * 3, ""),
        (Odd(), [((X,),), ((X[:2],),)], "Odd: its inputs change from step to step"),
        (Odd(), [((X, 1),), ((X, 2),)], "Odd: its inputs change from step to step"),
        (Odd(), [((X,), (X,))], "Odd: a step calls it 2 times"),
        (Odd(), [()], "Odd: a step calls it 0 times"),
        (Odd(), [((X, {1}),)], "Odd: an argument is of type set"),
        (Odd({1}), [((X,),)], "Odd: it returns something of type set"),
        (Odd(), [], "no step was seen"),
        (nn.Sequential(nn.ReLU()), [((X,),)], "Sequential: it has no parameters"),
    ],
)  # fmt: skip
def test_why_no_graph(model: nn.Module, inputs: list[tuple[Any, ...]], why: str) -> None:
    assert watched(model, inputs) == why


def test_why_no_graph_of_a_module_that_is_not_plain() -> None:
    hooked = Odd()
    hooked.layer.register_forward_hook(lambda *_: None)
    assert "has hooks" in watched(hooked, [((X,),)])
    replaced = Odd()
    replaced.forward = lambda x: x
    assert watched(replaced, [((X,),)]) == "Odd: its forward was replaced"
    synchronised = nn.SyncBatchNorm(2)
    assert "SyncBatchNorm" in watched(nn.Sequential(nn.Linear(2, 2), synchronised).eval(), [((X,),)])
    assert watched(Odd(), [((X,),)], "blocks") == "the model has no list of blocks"


def test_blocks_are_the_longest_list_of_modules_with_layers() -> None:
    model = Model()
    assert blocks_of(model) == list(model.blocks)
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_graphs_need_gradients_that_are_copied_out() -> None:
    with pytest.raises(ValueError, match="cuda_graphs: needs gradient_as_bucket_view = true beside it"):
        Configuration({"cuda_graphs": "model"})
    assert Configuration({"cuda_graphs": "model", "gradient_as_bucket_view": True}).rung.value == "exact"
