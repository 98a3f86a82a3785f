"""The first guess from a measured link: as good as the best of a simulated job whose link the model describes."""

from __future__ import annotations

import pytest
from simulated import BACKWARD, FORWARD, MIB, SimulatedJob, facts

from autoddp.bench import fit
from autoddp.knobs import Configuration, Rung
from autoddp.knobs.ddp_arguments import caps
from autoddp.study.first_guess import first_cap
from autoddp.study.trials import Space

GRADIENT_BYTES = int(MIB * 2**20)


@pytest.mark.parametrize("mib_per_second", [50.0, 200.0, 1000.0, 5000.0])
@pytest.mark.parametrize("latency", [0.0001, 0.001, 0.01])
def test_the_cap_is_nearly_the_best(mib_per_second: float, latency: float) -> None:
    job = SimulatedJob(mib_per_second, latency, copies=0.0)
    model = fit([(size, latency + size / 2**20 / mib_per_second) for size in (1024, 2**16, 2**20, 2**24, 2**26)])
    cap = first_cap(model, GRADIENT_BYTES, FORWARD + BACKWARD)
    best = min(job.cost(Configuration({"bucket_cap_mb": cap})) for cap in caps(MIB))
    assert job.cost(Configuration({"bucket_cap_mb": cap})) <= 1.02 * best


def test_it_is_tried_first() -> None:
    space = Space(Rung.EXACT, facts(), first_cap=4.0)
    assert space.guesses()[0]["bucket_cap_mb"] == {"bucket_cap_mb": 4.0}
    assert space.guesses()[1:] == Space(Rung.EXACT, facts()).guesses()
    assert Space(Rung.EXACT, facts(), first_cap=3.0).guesses() == Space(Rung.EXACT, facts()).guesses()
