"""The sum of a tensor's bits takes little memory beside the tensor, and is the same however it is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.worker.gradients import equal_parameters
from autoddp.worker.gradients.equal_parameters import knobs_that_part_ranks, sum_of_bits

SMALL = 64  # numbers that are summed at once


class Sums(TorchDispatchMode):
    """Notes the largest tensor that is summed: torch makes a copy of it in 64 bits."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.sum:
            self.largest = max(self.largest, args[0].numel())
        return function(*args, **(kwargs or {}))


TENSORS = {
    "float32": torch.randn(100, 40),
    "bfloat16": torch.randn(100, 40).bfloat16(),
    "complex": torch.randn(100, 20, dtype=torch.complex64),
    "conjugate": torch.randn(100, 20, dtype=torch.complex64).conj(),
    "its imaginary part": torch.randn(100, 20, dtype=torch.complex64).conj().imag,
    "one row": torch.randn(1, 4000),
    "transposed": torch.randn(40, 60).t(),
    "channels last": torch.randn(90, 4, 2, 2).contiguous(memory_format=torch.channels_last),
    "one number": torch.randn(()),
    "none": torch.randn(0, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_large_tensor_is_summed_in_parts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    at_once = int(sum_of_bits(TENSORS[name]))
    monkeypatch.setattr(equal_parameters, "_AT_ONCE", SMALL)
    with Sums() as sums:
        in_parts = int(sum_of_bits(TENSORS[name]))
    assert in_parts == at_once
    assert sums.largest <= SMALL


def test_ranks_are_compared_also_where_only_a_setting_of_nccl_may_lose_data() -> None:
    """The recipe may come from another machine, on which a benchmark has seen right sums under it."""
    variables = {"NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS"}
    assert knobs_that_part_ranks(AS_WRITTEN, variables) == "NCCL_P2P_LEVEL=SYS"
    found = knobs_that_part_ranks(Configuration({"hook": "bf16", "bucket_cap_mb": 4.0}), variables)
    assert found == 'hook="bf16" NCCL_P2P_LEVEL=SYS'
    assert knobs_that_part_ranks(Configuration({"bucket_cap_mb": 4.0}), {"NCCL_ALGO": "Ring"}) == ""
