"""How many cores a job has."""

from __future__ import annotations

import pytest

from autoddp.topology.system import machine


@pytest.mark.parametrize(("shown", "quota", "cores"), [(64, None, 64), (64, 4.0, 4), (64, 0.5, 1), (2, 4.0, 2)])
def test_a_container_has_no_more_cores_than_its_quota(
    shown: int, quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: shown)
    monkeypatch.setattr(machine, "cgroup_cpus", lambda _root: quota)
    assert machine.usable_cores() == cores
