"""The lines that `autoddp recipe code` prints, run as they are by two gloo ranks: they train as the recipe does."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from own_code_checks import RECIPE, checks

from autoddp.knobs import Configuration
from autoddp.own_code import lines_for


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("accelerate")
    return on_ranks(2, checks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("form", ["ddp", "accelerate"])
def test_ddp_is_built_as_by_the_recipe(ranks: list[dict[str, Any]], form: str) -> None:
    for found in ranks:
        for name in ("exact", "near"):
            settings = found[f"{name} recipe"]["settings"]
            assert found[f"{name} {form}"]["settings"] == settings
            assert "bucket_cap_bytes" in settings
        assert "fp16_compress_hook" in found[f"near {form}"]["hook"]


@pytest.mark.parametrize("form", ["ddp", "accelerate"])
def test_exact_settings_train_to_the_same_bits(ranks: list[dict[str, Any]], form: str) -> None:
    for found in ranks:
        pairs = zip(found[f"exact {form}"]["parameters"], found["exact recipe"]["parameters"], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("form", ["ddp", "accelerate"])
def test_torchs_hook_trains_as_ours_but_for_rounding(ranks: list[dict[str, Any]], form: str) -> None:
    for found in ranks:
        for one, other in zip(found[f"near {form}"]["parameters"], found["near recipe"]["parameters"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.fixture
def torchvision() -> None:
    """Frameworks import it where it is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torchvision_on_cpu")


@pytest.mark.whole
@pytest.mark.usefixtures("torchvision")
def test_lightning_takes_the_lines() -> None:
    pytest.importorskip("lightning")
    values = {"bucket_cap_mb": 2.0, "static_graph": True, "hook": "fp16"}
    strategy = made_by("lightning", values)["strategy"]
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 2.0, "static_graph": True}
    assert strategy._ddp_comm_hook.__name__ == "fp16_compress_hook"


@pytest.mark.whole
@pytest.mark.usefixtures("torchvision")
def test_transformers_takes_the_lines() -> None:
    pytest.importorskip("transformers")
    arguments = made_by("trainer", {"bucket_cap_mb": 2.0, "static_graph": True, "broadcast_buffers": False})[
        "arguments"
    ]
    assert (arguments.ddp_bucket_cap_mb, arguments.ddp_broadcast_buffers) == (2.0, False)
    assert arguments.ddp_static_graph is True


def made_by(form: str, values: dict[str, Any]) -> dict[str, Any]:
    """The names that the lines leave behind."""
    names: dict[str, Any] = {}
    exec(lines_for(replace(RECIPE, configuration=Configuration(values)), "train.autoddp.toml", form).text, names)
    return names
