"""A script that captures a step in a CUDA graph of its own repeats what the worker did in that step, for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_graph_checks as script
import pytest
import torch
from on_ranks import on_ranks

from autoddp.worker.ddp.handlers import CAPTURES

Checks = Callable[[int], dict[str, Any]]


@pytest.mark.parametrize("checks", [script.deferred, script.accumulated])
def test_nothing_is_put_off_in_a_captured_step(checks: Checks, tmp_path: Path) -> None:
    first, second = on_ranks(2, checks, tmp_path)
    assert first["error"] == ""
    assert first["gradients"]
    for mine, theirs in zip(first["gradients"], second["gradients"], strict=True):
        assert torch.equal(mine, theirs)
    assert first["moved"]
    assert any("is left out: the script captures" in line for line in first["said"])


@pytest.mark.parametrize("checks", [script.deferred_in_the_middle, script.accumulated_in_the_middle])
def test_what_was_put_off_before_stops_the_job(checks: Checks, tmp_path: Path) -> None:
    for found in on_ranks(2, checks, tmp_path):
        assert "has left gradients unreduced: the job stops" in found["error"]
        assert not found["moved"]


def test_the_monitor_does_not_look_in_a_captured_step(tmp_path: Path) -> None:
    first, _ = on_ranks(2, script.monitored, tmp_path)
    assert first["error"] == ""
    assert [line for line in first["said"] if "gradient monitor" in line] == [
        f"warning: {CAPTURES}: the gradient monitor does not see what the graph repeats"
    ]
