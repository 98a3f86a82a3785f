"""autoddp as a user runs it: ranks that share the one GPU are tuned and launched, and what a recipe costs there."""

import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launchers import AUTODDP, ROOT, TORCHRUN, start, wait_for

from autoddp.isolation.mps import mps_folder
from autoddp.knobs import Configuration
from autoddp.recipe import load, save
from autoddp.topology.nccl.transports import used
from autoddp.topology.nccl_log import read_nccl_log

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.alone]
JOB = str(Path(__file__).parent / "train_on_one_gpu.py")
VIT = str(ROOT / "recipes" / "vit" / "train.py")
COST = 0.005
"""Of a step's time, which a recipe may cost."""


SHARES = """
import sys
import torch
import torch.multiprocessing as mp

sys.path.insert(0, {folder!r})

def add_one(tensors, done):
    tensor = tensors.get()
    tensor += 1
    torch.cuda.synchronize()
    done.set()

if __name__ == "__main__":
    context = mp.get_context("spawn")
    tensors, done = context.Queue(), context.Event()
    child = context.Process(target=add_one, args=(tensors, done))
    child.start()
    shared = torch.zeros(2**20, device="cuda")
    tensors.put(shared)
    assert done.wait(60)
    assert shared.sum().item() == 2**20
    child.join()
    import train_on_one_gpu
    train_on_one_gpu.main()
"""


def ended(launch, seconds=280):
    try:
        launch.process.wait(seconds)
    finally:
        launch.kill()
    assert launch.returncode == 0, launch.stderr[-3000:]
    return launch


def study_of(launch):
    return json.loads(next(launch.folder.glob(".autoddp/2*/summary.json")).read_text())


def test_gloo_ranks_that_share_a_gpu_are_tuned_and_launched(gpu, tmp_path, figure):
    launch = ended(start(AUTODDP, tmp_path / "run", ["--standalone", "--nproc-per-node", "2", "--trials", "8", JOB]))
    study = study_of(launch)
    figure("trials", dict(Counter(trial["state"] for trial in study["trials"])))
    assert len(study["trials"]) == 8
    assert study["job"]["devices"] == [torch.cuda.get_device_name(gpu)]
    assert any(trial["state"] == "measured" for trial in study["trials"])
    assert launch.stdout.count("trained") == 2


@pytest.fixture
def mps(gpu):
    """Variables of a daemon of our own, and its log. A socket's path may not be long."""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        pytest.skip("needs nvidia-cuda-mps-control, and here is none")
    with tempfile.TemporaryDirectory(prefix="mps") as pipes, tempfile.TemporaryDirectory() as logs:
        own = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": logs}
        daemon = subprocess.Popen([program, "-f"], env={**os.environ, **own})
        try:
            wait_for(lambda: daemon.poll() is not None or mps_folder(own), "the daemon")
            if daemon.poll() is not None:
                pytest.skip("needs an MPS daemon, and here none may run")
            yield own, Path(logs) / "control.log"
        finally:
            subprocess.run([program], input="quit\n", env={**os.environ, **own}, text=True, timeout=60)
            daemon.kill()
            daemon.wait(60)


def test_a_job_under_an_mps_daemon_is_tuned_and_launched(mps, tmp_path, figure):
    """Files and pipe must be the same for the daemon and for the ranks of an attempt."""
    variables, log = mps
    words = ["--standalone", "--nproc-per-node", "2", "--trials", "2", JOB]
    launch = ended(start(AUTODDP, tmp_path / "run", words, variables))
    said = next(line for line in launch.stderr.splitlines() if "isolation: " in line)
    served = log.read_text().count("NEW CLIENT")
    figure("isolation", said.partition("isolation: ")[2][:40])
    figure("clients of the daemon", served)
    assert "MPS daemon" in said
    assert served >= 4  # two ranks that are tuned, and two that are launched
    assert launch.stdout.count("trained") == 2


def test_what_nccl_used_stands_beside_the_prediction_after_tuning(needs_gpus, tmp_path, figure):
    """Where the two differ, a line says so."""
    needs_gpus(2)
    words = ["--standalone", "--nproc-per-node", "2", "--trials", "2", "--tune-only", JOB, "--backend", "nccl"]
    launch = ended(start(AUTODDP, tmp_path / "run", words))
    found = study_of(launch)["transports"]
    figure("ways", "; ".join(f"{way['between']} {way['predicted']}: {'+'.join(way['used'])}" for way in found["ways"]))
    assert [way["between"] for way in found["ways"]] == ["GPU0-GPU1"]
    for finding in found["findings"]:
        assert finding in launch.stderr


def test_an_attempt_reaches_the_other_gpus_as_the_job_does(needs_gpus, tmp_path, figure):
    """NCCL shares memory by CUDA's handles, by files in /dev/shm and by sockets: an attempt has all of its own."""
    needs_gpus(2)
    words = ["--standalone", "--nproc-per-node", "2"]
    tuned = ended(start(AUTODDP, tmp_path / "run", [*words, "--trials", "2", "--tune-only", JOB, "--backend", "nccl"]))
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%p.log")}
    ended(start(TORCHRUN, tmp_path / "torchrun", [*words, JOB, "--backend", "nccl", "--steps", "40"], log))
    as_written = read_nccl_log("\n".join(file.read_text() for file in tmp_path.glob("nccl.*.log")))
    figure("isolation", next(line for line in tuned.stderr.splitlines() if "isolation: " in line)[:60])
    figure("used", " and ".join(used(as_written)))
    assert used(as_written) == study_of(tuned)["transports"]["used"] != []


def test_processes_of_an_attempt_share_memory_of_the_gpu(gpu, tmp_path, figure):
    """By CUDA's handles: `torch.multiprocessing` sends a tensor to a process of the rank's, which writes into it."""
    script = tmp_path / "shares.py"
    script.write_text(SHARES.format(folder=str(Path(JOB).parent)))
    words = ["--standalone", "--nproc-per-node", "2", "--trials", "2", "--allow", "exact", str(script)]
    launch = ended(start(AUTODDP, tmp_path / "run", words))
    figure("isolation", next(line for line in launch.stderr.splitlines() if "isolation: " in line)[:60])
    assert study_of(launch)["trials"]
    assert launch.stdout.count("trained") == 2


def test_a_vision_transformer_as_a_world_of_one(gpu, tmp_path, figure):
    pytest.importorskip("torchvision", reason="needs torchvision")
    launch = ended(
        start(AUTODDP, tmp_path / "run", ["--standalone", "--nproc-per-node", "1", "--trials", "20", VIT, "--bf16"])
    )
    figure("said", next((line for line in launch.stderr.splitlines() if "of one rank" in line), "")[:120])
    assert "ms per step" in launch.stdout


def test_a_vision_transformer_with_four_gloo_ranks(gpu, tmp_path, figure):
    pytest.importorskip("torchvision", reason="needs torchvision")
    words = ["--standalone", "--nproc-per-node", "4", "--trials", "20", VIT, "--batch-size", "8", "--bf16"]
    launch = ended(start(AUTODDP, tmp_path / "run", words))
    study = study_of(launch)
    figure("trials", dict(Counter(trial["state"] for trial in study["trials"])))
    figure("launched", next((line for line in launch.stderr.splitlines() if "launching" in line), "")[:120])
    assert "ms per step" in launch.stdout


def step_ms(command, folder, words):
    """Of the job's quietest block of steps."""
    launch = ended(start(command, folder, ["--standalone", "--nproc-per-node", "2", *words, "--wide"]))
    found = re.search(r"ms per step ([0-9]+\.[0-9]{4})", launch.stdout)  # the other rank may write behind it
    assert found
    return float(found[1])


def test_a_recipe_costs_next_to_nothing(gpu, tmp_path, figure):
    """In turns, against the same settings written into the script."""
    tuning = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--trials",
        "1",
        "--tune-only",
        "--budget",
        "120s",
        "--diagnose-budget",
        "0",
        "--recipe",
        "found.toml",
        JOB,
        "--wide",
    ]
    found = ended(start(AUTODDP, tmp_path / "tuning", tuning)).folder / "found.toml"
    recipe = str(tmp_path / "recipe.toml")
    save(replace(load(found), configuration=Configuration({"gradient_as_bucket_view": True}), env={}), Path(recipe))
    ours, theirs = [], []
    for turn in range(3):
        ours.append(step_ms(AUTODDP, tmp_path / f"ours{turn}", ["--recipe", recipe, JOB]))
        theirs.append(step_ms(TORCHRUN, tmp_path / f"theirs{turn}", [JOB, "--bucket-view"]))
    cost = statistics.median(ours) / statistics.median(theirs) - 1
    figure("cost", f"{cost:+.2%} of {statistics.median(theirs):.2f} ms")
    assert cost <= COST
