"""A job that gets its memory anew in each step: keeping it is tried, and the launched job keeps it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launchers import AUTODDP, start

from autoddp.knobs.env import keeps_memory
from autoddp.recipe import load, save

JOB = """
import ctypes, os, torch
from torch import nn
if "GLIBC_TUNABLES" not in os.environ:  # else what glibc does by itself depends on chance
    ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: each tensor of a step is returned when it is freed
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Conv2d(1, 24, 3), nn.ReLU(), nn.Conv2d(24, 8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch = torch.randn(32, 1, 64, 64)
open(f"tunables{rank}", "w").write(os.environ.get("GLIBC_TUNABLES", ""))
for _ in range(int(os.environ.get("STEPS", "100000"))):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
os._exit(0)
"""


@pytest.mark.whole
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_keeping_memory_is_tried_and_launched(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    ranks = ["--nproc-per-node", "2"]
    asked = ["--trials", "10", "--allow", "exact", "--tune-only", "--diagnose-budget", "0"]
    tuned = start(AUTODDP, tmp_path / "tuned", [*ranks, *asked, str(script)], {}).wait()
    assert tuned.returncode == 0, tuned.stderr[-2000:]
    study = json.loads(max(tuned.folder.glob(".autoddp/2*/summary.json")).read_text())
    assert study["job"]["start_settings"] == [{"malloc": keeps_memory()}]
    tried = [trial for trial in study["trials"] if "malloc" in trial["configuration"]]
    assert tried
    assert {trial["state"] for trial in tried} == {"measured"}

    (recipe,) = tuned.folder.glob("*.autoddp.toml")
    found = load(recipe)
    assert found.env.get("GLIBC_TUNABLES") in (None, keeps_memory())  # whether it won depends on the machine
    save(replace(found, env={**found.env, "GLIBC_TUNABLES": keeps_memory()}), tmp_path / "keeps.toml")
    words = [*ranks, "--recipe", str(tmp_path / "keeps.toml"), str(script)]
    job = start(AUTODDP, tmp_path / "job", words, {"STEPS": "5"}).wait()
    assert job.returncode == 0, job.stderr[-2000:]
    assert [(job.folder / f"tunables{rank}").read_text() for rank in range(2)] == [keeps_memory()] * 2
