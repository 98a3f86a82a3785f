"""Compiled models: however torch.compile was told of them, cut in other places, and replayed as its own graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compile_checks import checks
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.worker.ddp.backward import after_this_backward, when_backward_begins
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.patch import Patch

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Ranks:
    world_size = 2 if request.config.getoption("--whole") else 1
    return on_ranks(world_size, checks, tmp_path_factory.mktemp("compiled"))


def test_compiled_is_compiled_however_it_was_done(ranks: Ranks) -> None:
    inside, outside = (True, True), (True, False)
    expected = {"plain": (False, False), "inside": inside, "a part": inside, "around": outside, "method": outside}
    assert [rank["ways"] for rank in ranks] == [expected] * len(ranks)


class Looks(DdpEvents):
    """Looks at backward passes, as handlers do."""

    told = 0

    def returned(self, ddp: DDP, what: Any) -> Any:
        when_backward_begins(what, lambda: after_this_backward(lambda: None))
        return what

    def python_reduces(self) -> None:
        self.told += 1


def with_python_reducer(rank: int) -> dict[str, Any]:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    torch._dynamo.config.compiled_autograd = True
    patch = Patch()
    patch.configuration = Configuration({"gradient_as_bucket_view": True})
    patch.events = events = Looks()
    patch.install()
    ddp = DDP(nn.Linear(4, 1, bias=False))
    model = torch.compile(ddp, backend="aot_eager")

    @torch.compile(backend="aot_eager")
    def train(x: torch.Tensor) -> None:
        model(x).sum().backward()

    for _ in range(2):
        ddp.zero_grad()
        train(torch.full((1, 4), float(rank)))
    gradient = ddp.module.weight.grad
    return {"told": events.told, "has view": ddp.gradient_as_bucket_view, "gradient": gradient.tolist()}


def test_a_model_whose_gradients_torch_reduces_in_python_stays_as_written(tmp_path: Path) -> None:
    """torch.compile traces its passes whole, and cannot trace what handlers call there."""
    expected = {"told": 1, "has view": False, "gradient": [[0.5] * 4]}
    assert on_ranks(2, with_python_reducer, tmp_path) == [expected] * 2


def test_what_autoddp_does_beside_the_forward_pass_is_not_compiled(ranks: Ranks) -> None:
    """It would take seconds, print warnings of torch's, and run functions with a cache again."""
    for traced in (rank["traced"] for rank in ranks):
        assert any("torch" in file for file in traced)
        assert not [file for file in traced if file.endswith("compile_checks.py")]  # the handler's


def test_a_compiled_model_is_cut_where_its_buckets_end(ranks: Ranks) -> None:
    """Four MiB: as written a first piece and the rest; whole; a first and two more. A hook cuts nothing anew."""
    for pieces in (rank["pieces"] for rank in ranks):
        assert pieces["graphs"] == [2, 1, 3, 0, 2]
        assert [bool(count) for count in pieces["counted"]] == [True, True, True, False, True]
        assert pieces["called_back"] == sum(pieces["counted"])
        same(*pieces["states"])


def test_what_ddp_calls_is_replayed_and_nothing_else(ranks: Ranks) -> None:
    for replayed in (rank["replayed"] for rank in ranks):
        assert replayed["why_not"] == ""
        assert replayed["by_turning"] == [False, False, True, True]  # two pieces as written, compared with themselves
        assert replayed["elsewhere"] == [False]
        assert replayed["by_training"] == []
        assert replayed["taken_back"] == [False, False]


def test_replaying_trains_as_without(ranks: Ranks) -> None:
    """BatchNorm's statistics and random numbers as if nothing had been compared, and no result overwritten."""
    for replayed in (rank["replayed"] for rank in ranks):
        assert replayed["left_a_trace"] == []
        assert not replayed["overwritten"]
        same(*replayed["states"])


def test_replaying_is_refused_with_its_reason(ranks: Ranks) -> None:
    for refused in (rank["refused"] for rank in ranks):
        assert refused["wrong"] == "the graph of OptimizedModule does not give what the module gives"
        assert refused["left_a_trace"] == []
        assert refused["compiled"] == [False, False, True, True, False, False]
        assert refused["twice"] == "a step calls it 2 times"
        assert refused["around"] == "torch.compile was not given what is inside DDP"


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], msg=name)
