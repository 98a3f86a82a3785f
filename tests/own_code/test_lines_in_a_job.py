"""The lines that `autoddp recipe code` prints, run as they are by two gloo ranks: they train as the recipe does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from own_code_checks import checks


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
