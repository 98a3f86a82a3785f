"""NUMA binding: tried live on a machine whose kernel lists two NUMA nodes, and given to the launched job."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from launchers import AUTODDP, SCRIPTS, may_mount, on_numa_nodes, start

from autoddp.knobs import Configuration
from autoddp.recipe import load, save

PLAIN = str(SCRIPTS / "plain.py")
CPUS = sorted(os.sched_getaffinity(0))


pytestmark = pytest.mark.skipif(not may_mount(), reason="needs root, mounts of its own (unshare -m) and two CPUs")


def launched(command, folder, *words):
    launch = start(command, folder, ["--nproc-per-node", "2", *words, PLAIN], {"TUNED_TIMES_LONGER": "12"}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch


@pytest.mark.whole
def test_tried_first_and_launched(tmp_path):
    two_nodes = on_numa_nodes(tmp_path / "nodes", str(CPUS[0]), ",".join(map(str, CPUS[1:])))
    tuned = launched([*two_nodes, *AUTODDP], tmp_path / "tuned", "--trials", "4", "--tune-only")
    study = json.loads(max(tuned.folder.glob(".autoddp/2*/summary.json")).read_text())
    assert study["trials"][0]["configuration"] == {"numa_binding": "node"}
    assert study["trials"][0]["state"] != "failed"

    found = load(tuned.folder / "scripts.plain.autoddp.toml")
    save(replace(found, configuration=Configuration({"numa_binding": "node"}), env={}), tmp_path / "bound.toml")
    recipe = ["--recipe", str(tmp_path / "bound.toml")]
    job = launched([*two_nodes, *AUTODDP], tmp_path / "job", *recipe)
    assert [(job.folder / f"cpus{rank}").read_text().split() for rank in range(2)] == [
        [str(CPUS[0])],
        [str(cpu) for cpu in CPUS[1:]],
    ]
    elsewhere = launched(AUTODDP, tmp_path / "elsewhere", *recipe)
    assert (elsewhere.folder / "cpus0").read_text().split() == [str(cpu) for cpu in CPUS]
    assert "the recipe's numa_binding is left out: its CPUs are on one NUMA node" in elsewhere.stderr
