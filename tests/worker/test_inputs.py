"""What a forward pass is called with, as a recipe has it: types and dimensions of whatever scripts hand to models."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from autoddp.recipe import input_differences, merged, of_model, with_model
from autoddp.recipe.inputs import is_input
from autoddp.worker.ddp.inputs import inputs_of

Pair = namedtuple("Pair", ["left", "right"])
IMAGES = torch.zeros(8, 3, 4, 4)
LABELS = torch.zeros(8, dtype=torch.int64)


@dataclass
class Batch:
    images: torch.Tensor
    labels: torch.Tensor | None = None


@dataclass(slots=True)
class Slots:
    images: torch.Tensor
    labels: torch.Tensor = field(init=False)


class Raises(Mapping[str, Any]):
    """A container that cannot be read before something else has happened."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("not yet")

    def __iter__(self) -> Iterator[str]:
        return iter(["one"])

    def __len__(self) -> int:
        return 1


class Graph:
    """An object of a library: looking into it may have effects."""

    @property
    def nodes(self) -> Any:
        raise AssertionError("was looked at")


CASES: list[tuple[tuple[Any, ...], dict[str, Any], list[str]]] = [
    ((IMAGES,), {}, ["0: float32[8, 3, 4, 4]"]),
    ((IMAGES, LABELS), {"scale": 2.0}, ["0: float32[8, 3, 4, 4]", "1: int64[8]", "scale: float"]),
    (({"ids": LABELS, "mask": None},), {}, ["0.ids: int64[8]", "0.mask: NoneType"]),
    ((UserDict({"ids": LABELS}), OrderedDict(x=LABELS)), {}, ["0.ids: int64[8]", "1.x: int64[8]"]),
    ((Batch(IMAGES),), {}, ["0.images: float32[8, 3, 4, 4]", "0.labels: NoneType"]),
    ((Slots(IMAGES),), {}, ["0.images: float32[8, 3, 4, 4]", "0.labels: NoneType"]),
    ((Pair(LABELS, (LABELS, 3)),), {}, ["0.0: int64[8]", "0.1.0: int64[8]", "0.1.1: int"]),
    (([torch.zeros(3, 5, 7), torch.zeros(3, 6, 7)],), {}, ["0[]: float32[3, *, 7]"]),
    (([{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(9, 4)}],), {}, ["0[].boxes: float32[*, 4]"]),
    (({1: LABELS, 2: torch.zeros(9, dtype=torch.int64)},), {}, ["0[]: int64[*]"]),
    ((torch.tensor(1.0),), {}, ["0: float32[]"]),
    ((Graph(),), {}, ["0: Graph"]),
    ((), {}, ["inputs: none"]),
    (([],), {}, ["inputs: none"]),
    ((Raises(),), {}, ["0: Raises"]),
    (({"odd: [key]\n": LABELS},), {}, ["0.odd key: int64[8]"]),
]


class Lazy(Mapping[str, Any]):
    """A batch whose fields are augmented when the model asks for them, as datasets' LazyRow with a random transform."""

    def __getitem__(self, key: str) -> Any:
        return IMAGES + torch.rand(())

    def __iter__(self) -> Iterator[str]:
        return iter(["images"])

    def __len__(self) -> int:
        return 1


class LazyDict(dict[str, Any]):
    """The same over a dict, which holds how a field is made."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) + torch.rand(())

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]


class LazyTuple(tuple[Any, ...]):
    """The same over a tuple."""

    def __iter__(self) -> Iterator[Any]:
        return iter([part + torch.rand(()) for part in super().__iter__()])


@dataclass
class LazyFields:
    """The same, field by field."""

    images: Any

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return found + torch.rand(()) if name == "images" else found


LAZY = [Lazy(), LazyDict(images=IMAGES), UserDict({"one": Lazy()}), LazyTuple([IMAGES]), LazyFields(IMAGES)]


@pytest.mark.parametrize("batch", LAZY, ids=type)
def test_looking_at_a_batch_draws_no_random_number(batch: Any) -> None:
    before = torch.get_rng_state()
    inputs_of((batch,), {}, "cpu")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("args", "kwargs", "texts"), CASES)
def test_texts(args: tuple[Any, ...], kwargs: dict[str, Any], texts: list[str]) -> None:
    found = inputs_of(args, kwargs, "cpu")
    assert list(found) == texts
    assert all(map(is_input, found))
    assert not input_differences(found, inputs_of(args, kwargs, "cpu"))
    assert merged(found, found) == found


def test_a_batch_of_very_many_is_described_by_the_first() -> None:
    found = inputs_of(tuple(LABELS for _ in range(1000)), {}, "cpu")
    assert len(found) == 64
    deep: Any = LABELS
    for _ in range(5000):
        deep = (deep,)
    assert inputs_of((deep,), {}, "cpu") == ("0.0.0.0.0.0.0: tuple",)


def test_a_list_in_itself_ends() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert all(map(is_input, inputs_of((circle,), {}, "cpu")))


def test_autocast_is_part_of_it() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert inputs_of((LABELS,), {}, "cpu") == ("0: int64[8]", "autocast: bfloat16")
    assert input_differences(["0: int64[8]"], ["0: int64[8]", "autocast: bfloat16"]) == [
        "input autocast absent in the recipe, bfloat16 here"
    ]


def test_what_varied_is_free() -> None:
    seen = merged(["0: float32[8, 16]", "1: int64[8]"], ["0: float32[5, 16]", "1: int64[5]", "last: bool"])
    assert seen == ("0: float32[*, 16]", "1: int64[*]", "last: *")
    assert not input_differences(seen, ["0: float32[99, 16]", "1: int64[99]"])
    assert not input_differences(seen, ["0: float32[99, 16]", "1: int64[99]", "last: str"])
    assert input_differences(seen, ["0: float32[99, 17]", "1: int64[99]"])
    assert input_differences(seen, ["0: float16[99, 16]", "1: int64[99]"])
    assert input_differences(seen, ["0: float32[99]", "1: int64[99]"])
    assert input_differences(seen, ["0: float32[99, 16]"])
    assert input_differences(seen, ["0: float32[99, 16]", "1: int64[99]", "2: int64[99]"])
    any_rank = merged(["0: float32[8]"], ["0: float32[8, 2]"])
    assert any_rank == ("0: float32[...]",)
    assert not input_differences(any_rank, ["0: float32[1, 2, 3]"])
    assert merged(any_rank, ["0: float32[4]"]) == any_rank


def test_models_have_names_where_there_are_several() -> None:
    assert with_model(["0: int64[8]"], 0, 1) == ["0: int64[8]"]
    both = with_model(["0: int64[8]"], 0, 2) + with_model(["0: int64[9]"], 1, 2)
    assert both == ["model 1.0: int64[8]", "model 2.0: int64[9]"]
    assert of_model(both, 1, 2) == ["0: int64[9]"]
    assert of_model(["0: int64[8]"], 0, 1) == ["0: int64[8]"]
