"""The bucket plan: DDP itself, on real models, cuts just so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.predict import Cuts, Gradient, buckets
from autoddp.units import MIB


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 256, 3), nn.BatchNorm2d(256), nn.Conv2d(256, 512, 3), nn.Conv2d(512, 512, 3))


def large_first() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024), nn.Linear(1024, 8), nn.Linear(8, 8))


class TwoTypes(nn.Module):
    """Some gradients are float64, in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(400, 400, dtype=[torch.float32, torch.float64][i % 2]) for i in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


MODELS = {"mlp": mlp, "conv": conv, "large first": large_first, "two types": TwoTypes}
INPUTS = {"mlp": (4, 512), "conv": (2, 3, 7, 7), "large first": (4, 1024), "two types": (4, 400)}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": 25},
    {"bucket_cap_mb": 3},
    {"bucket_cap_mb": 0.5},
    {"bucket_cap_mb": 100},
    {"bucket_cap_mb_list": [5, 2, 1]},
    {"bucket_cap_mb_list": [0.5, 4]},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "bucket_cap_mb": 2},
    {"find_unused_parameters": True, "bucket_cap_mb_list": [4, 1]},
    {"find_unused_parameters": True, "static_graph": True},
    {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 1},
]


def launched(_rank: int) -> dict[str, Any]:
    """Bytes of the buckets that DDP launches in its third step, the order of the gradients, and their shapes."""
    found: dict[str, Any] = {}
    for name, build in MODELS.items():
        for number, arguments in enumerate(ARGUMENTS):
            model = build()
            order: list[int] = []
            for place, parameter in enumerate(model.parameters()):
                parameter.register_post_accumulate_grad_hook(lambda _p, place=place, order=order: order.append(place))
            ddp, sizes = DDP(model, **arguments), []

            def hook(_state: object, bucket: Any, sizes: list[int] = sizes) -> Any:
                sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
                done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                done.set_result(bucket.buffer())
                return done

            hook.__annotations__ = {}
            ddp.register_comm_hook(None, hook)
            for _ in range(3):
                order.clear()
                sizes.clear()
                ddp(torch.randn(INPUTS[name])).sum().backward()
            shapes = [(tuple(p.shape), p.numel() * p.element_size()) for p in model.parameters()]
            found[f"{name} {number}"] = (list(sizes), list(order), shapes)
    return found


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank, because their number changes no cut."""
    return on_ranks(1, launched, Path(tmp_path_factory.mktemp("plan")))[0]


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("number", range(len(ARGUMENTS)), ids=lambda number: str(ARGUMENTS[number]))
def test_ddp_cuts_as_the_plan(real: dict[str, Any], model: str, number: int) -> None:
    sizes, order, shapes = real[f"{model} {number}"]
    gradients = [Gradient(shape, size) for shape, size in shapes]
    arguments = {name: repr(value) for name, value in ARGUMENTS[number].items()}
    cut = buckets(gradients, order, Cuts.of(arguments, Configuration()))
    planned = [sum(gradients[place].bytes for place in bucket) for bucket in cut]
    if model == "two types":  # the order of buckets that never reached their limit is that of a hash table
        assert sorted(planned) == sorted(sizes)
    else:
        assert planned == sizes


def mib(*sizes: float) -> list[Gradient]:
    return [Gradient((int(size * MIB) // 4,), int(size * MIB)) for size in sizes]


def test_a_configuration_wins_over_the_script() -> None:
    script = {"bucket_cap_mb_list": "[1, 2]", "gradient_as_bucket_view": "True"}
    assert Cuts.of(script, Configuration()).limits == (MIB, 2 * MIB)
    assert Cuts.of(script, Configuration({"bucket_cap_mb": 4})).limits == (4 * MIB,)
    assert Cuts.of({"bucket_cap_mb": "None"}, Configuration()).limits == (MIB, 25 * MIB)
    assert Cuts.of({"bucket_cap_mb": "7"}, Configuration({"bucket_cap_mb_list": (3, 1)})).limits == (3 * MIB, MIB)


def test_ten_mib_as_written() -> None:
    """The case of docs: the small bucket is the first that travels."""
    cut = buckets(mib(*[1] * 10), range(9, -1, -1), Cuts())
    assert cut == [[9], [8, 7, 6, 5, 4, 3, 2, 1, 0]]


@given(
    st.lists(st.floats(0.001, 30), min_size=1, max_size=40),
    st.lists(st.floats(0.5, 50), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_every_gradient_is_in_one_bucket(sizes: list[float], caps: list[float], random: Any, rebuilt: bool) -> None:
    gradients = mib(*sizes)
    order = random.sample(range(len(sizes)), len(sizes))
    cut = buckets(gradients, order, Cuts(tuple(int(cap * MIB) for cap in caps), rebuilt))
    assert sorted(place for bucket in cut for place in bucket) == list(range(len(sizes)))
    assert all(cut)
