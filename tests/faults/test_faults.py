"""A sample of the fault matrix; `make faults` runs all of it."""

from __future__ import annotations

import pytest
from launchers import whole

from faults.kinds import KINDS
from faults.matrix import cells, run

IN_CI = ("kill rank 0",)


@pytest.mark.parametrize("kind", [kind if kind in IN_CI else whole(kind) for kind in KINDS])
def test_a_fault_costs_its_trial(kind: str) -> None:
    for cell in cells([kind], sample=True):
        run(cell)
        assert cell.problems == [], cell.said
