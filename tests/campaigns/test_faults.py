"""One cell of each kind of fault, left to `make test-whole`; `make faults` runs all cells of the matrix."""

from __future__ import annotations

import pytest
from faults.kinds import KINDS
from faults.matrix import cells, run
from launchers import whole


@pytest.mark.parametrize("kind", [whole(kind) for kind in KINDS])
def test_a_fault_costs_its_trial(kind: str) -> None:
    for cell in cells([kind], sample=True):
        run(cell)
        assert cell.problems == [], cell.said
