"""A recipe fits, or the line says in which parts it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoddp.errors import UnfitRecipe
from autoddp.knobs import AS_WRITTEN
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, differences, require_fit

FITS = Fits(8, 2, "nccl", ("NVIDIA A100", "NVIDIA H100"), "2.13.0", 102228128, "0123456789abcdef")
RECIPE = Recipe(MadeBy("0.1.0", "2.13.0", "3.11.7", "now"), FITS, AS_WRITTEN, Evidence(31.0, 0.1, 20, 6, 100, "why"))


@pytest.mark.parametrize(
    "known",
    [
        {},
        {"world_size": 8, "nodes": 2},
        {"world_size": None},
        {"torch": "2.13.0+cu130"},
        {"devices": ["NVIDIA H100", "NVIDIA A100", "NVIDIA H100"]},
        {"gradient_bytes": 102228128, "parameters_digest": "0123456789abcdef"},
    ],
)
def test_what_fits(known: dict[str, Any]) -> None:
    assert differences(FITS, **known) == []
    require_fit(RECIPE, "train.autoddp.toml", **known)


@pytest.mark.parametrize(
    ("known", "phrase"),
    [
        ({"world_size": 2}, "world size 8 in the recipe, 2 here"),
        ({"nodes": 1}, "nodes 2 in the recipe, 1 here"),
        ({"backend": "gloo"}, "backend nccl in the recipe, gloo here"),
        ({"devices": ("cpu",)}, "devices NVIDIA A100 and NVIDIA H100 in the recipe, cpu here"),
        ({"torch": "2.12.1+cpu"}, "torch 2.13.0 in the recipe, 2.12.1 here"),
        ({"gradient_bytes": 4096}, "97.5 MiB of gradients in the recipe, 4.0 KiB here"),
        ({"gradient_bytes": 102228132}, "102228128 B of gradients in the recipe, 102228132 B here"),
        ({"parameters_digest": "f00d"}, "parameter shapes and types 0123456789abcdef in the recipe, f00d here"),
    ],
)
def test_each_difference_is_a_phrase(known: dict[str, Any], phrase: str) -> None:
    assert differences(FITS, **known) == [phrase]


MACHINE = replace(FITS, links=("NV18", "NV4 SYS"), networks=("InfiniBand 8 x 400 Gbit/s",), cuda="13.0", nccl="2.27.7")


@pytest.mark.parametrize(
    ("known", "phrases"),
    [
        ({"links": ("NV18",), "networks": ("InfiniBand 8 x 400 Gbit/s",), "cuda": "13.0", "nccl": "2.27.7"}, []),
        ({"links": (), "networks": None, "cuda": ""}, []),  # not known here
        ({"links": ("PIX SYS",)}, ["GPUs joined by NV18 and NV4 SYS in the recipe, PIX SYS here"]),
        ({"networks": ("TCP 25 Gbit/s",)}, ["network InfiniBand 8 x 400 Gbit/s in the recipe, TCP 25 Gbit/s here"]),
        ({"cuda": "12.8"}, ["CUDA 13.0 in the recipe, 12.8 here"]),
        ({"nccl": "2.26.2"}, ["NCCL 2.27.7 in the recipe, 2.26.2 here"]),
    ],
)
def test_the_machine(known: dict[str, Any], phrases: list[str]) -> None:
    assert differences(MACHINE, **known) == phrases
    assert differences(FITS, **known) == []  # a recipe that says nothing of these depends on none of them
    assert MACHINE.digest != FITS.digest


@pytest.mark.parametrize(
    ("here", "phrases"),
    [((4,), []), ((8,), []), ((6,), ["ranks of a node 4 and 8 in the recipe, 6 here"])],
)
def test_a_node_has_one_of_the_numbers_of_ranks(here: tuple[int, ...], phrases: list[str]) -> None:
    uneven = replace(FITS, world_size=16, nodes=3, ranks_of_nodes=(4, 4, 8))
    assert differences(uneven, ranks_of_nodes=here, world_size=None, nodes=3) == phrases
    assert differences(FITS, ranks_of_nodes=here) == []  # all its nodes have as many


def test_the_refusal_names_them_all() -> None:
    with pytest.raises(UnfitRecipe) as caught:
        require_fit(RECIPE, "train.autoddp.toml", nodes=1, world_size=4)
    assert str(caught.value) == (
        "train.autoddp.toml: made for another job: world size 8 in the recipe, 4 here; nodes 2 in the recipe, 1 here: "
        "start as many ranks (--nnodes, --nproc-per-node), tune again with --trials 20, or launch it all the same with "
        "--force"
    )


def test_a_part_that_does_not_exist_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="wrld"):
        differences(FITS, wrld=3)


def test_hosts_with_several_versions_of_torch() -> None:
    """The host without the version of rank 0 tuned again at each start, while the other launched with the recipe."""
    of_both = replace(FITS, torch="2.12.1 and 2.13.0")
    assert [differences(of_both, torch=here) for here in ("2.12.1", "2.13.0+cu130")] == [[], []]
    assert differences(of_both, torch="2.14.0") == ["torch 2.12.1 and 2.13.0 in the recipe, 2.14.0 here"]
