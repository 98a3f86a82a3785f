"""CUDA graphs asked for where there is no GPU: not offered, with the reason; a recipe with them runs as written."""

from __future__ import annotations

import json
from dataclasses import replace

from launchers import AUTODDP, SCRIPTS, start

from autoddp.knobs import Configuration
from autoddp.recipe import load, save

PLAIN = str(SCRIPTS / "plain.py")


def launched(folder, *words):
    environment = {"TUNED_TIMES_LONGER": "12"}
    launch = start(AUTODDP, folder, ["--nproc-per-node", "2", *words, PLAIN], environment).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch


def test_without_a_gpu(tmp_path):
    tuned = launched(tmp_path / "tuned", "--cuda-graphs", "--trials", "2", "--tune-only")
    study = json.loads(max(tuned.folder.glob(".autoddp/*/summary.json")).read_text())
    assert study["job"]["left_out"]["cuda_graphs"] == "the models are not on a GPU"

    found = load(tuned.folder / "scripts.plain.autoddp.toml")
    asked = Configuration({"gradient_as_bucket_view": True, "cuda_graphs": "model"})
    save(replace(found, configuration=asked, env={}), tmp_path / "graphs.toml")
    job = launched(tmp_path / "job", "--recipe", str(tmp_path / "graphs.toml"))
    assert "autoddp: without CUDA graphs, as written: " in job.stderr
    assert "Traceback" not in job.stderr
