"""What a loader gives is measured and copied without asking a class of the script, which may augment what it gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from autoddp.worker.observe.loader import _measures

IMAGES = torch.zeros(8, 3)


class Lazy(Mapping[str, Any]):
    def __init__(self) -> None:
        self.images = IMAGES

    def __getitem__(self, key: str) -> Any:
        return self.images + torch.rand(())

    def __iter__(self) -> Iterator[str]:
        return iter(["images"])

    def __len__(self) -> int:
        return 1


class LazyDict(dict[str, Any]):
    def values(self) -> Any:
        return [value + torch.rand(()) for value in super().values()]


@pytest.mark.parametrize("batch", [Lazy(), LazyDict(images=IMAGES), {"images": IMAGES}, (IMAGES,)], ids=type)
def test_measuring_a_batch_draws_no_random_number(batch: Any) -> None:
    before = torch.get_rng_state()
    assert _measures(batch) == (8, 24, 96)
    assert torch.equal(torch.get_rng_state(), before)
