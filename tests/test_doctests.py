"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import autoddp

# The modules with examples, and how many lines of example each has at least: a lost one is noticed.
EXAMPLES = {
    "autoddp.errors": 2,
    "autoddp.units": 4,
    "autoddp.knobs.computing": 2,
    "autoddp.knobs.ddp_arguments": 2,
    "autoddp.knobs.configuration": 2,
    "autoddp.recipe.match": 1,
    "autoddp.timing.samples": 1,
    "autoddp.timing.speedup": 1,
    "autoddp.bench.conventions": 4,
    "autoddp.bench.result": 1,
    "autoddp.trace.chrome_format": 1,
    "autoddp.topology.nvidia.matrix": 2,
    "autoddp.topology.nccl.interface_names": 1,
    "autoddp.topology.nccl_log": 4,
    "autoddp.topology.nvidia.nvml": 1,
    "autoddp.topology.text": 3,
}
FLOORS = ("errors", "units", "log", "knobs", "timing", "recipe", "bench", "wire", "topology", "trace")


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(autoddp.__path__, "autoddp.", onerror=lambda _: None)]
    return [name for name in found if name.split(".")[1] in FLOORS]


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted >= EXAMPLES.get(name, 0)


def test_the_modules_with_examples_are_found() -> None:
    assert EXAMPLES.keys() <= set(modules())
