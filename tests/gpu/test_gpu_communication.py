"""A job of NCCL ranks that communicates by itself, without DDP. The ranks share the one GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launchers import environment
from test_gpu_diagnose import found, of_script

from autoddp import codec
from autoddp.torchrun.surroundings import for_own_workers
from autoddp.wire.replayed_calls import CALLS, DESTROY_GROUP, MAKE_GROUP, OBJECTS, WAIT, Act, Program, Replay, Replayed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_communicates_by_itself(gpu, tmp_path, figure, ranks):
    """Its calls are done again by NCCL too, by as many ranks as there are GPUs."""
    diagnosis = of_script(tmp_path, [str(HERE / "all_reduces_on_one_gpu.py")], ranks=ranks)
    figure("said", diagnosis["verdict"])
    assert "how long the GPU is in them is not seen" in diagnosis["verdict"][-1]
    rows = [row for row in diagnosis["communication"]["rows"] if row["collective"] == "all_reduce"]
    assert [row["backend"] for row in rows] == ["nccl"]
    assert any("how long the GPU itself" in line for line in diagnosis["not_measured"])
    if ranks == 1:  # two ranks reach each other by sockets, and the line that waits for the GPU takes nearly all
        one = found(diagnosis, "small_collectives", figure)
        figure("replayed", diagnosis["communication"]["replayed"])
        assert one["status"] == "proved"
        assert "all_reduces_on_one_gpu.py:" in one["text"]


def test_each_call_can_be_done_again_by_nccl(gpu, tmp_path, figure):
    """By two ranks where there are two GPUs, else by one. A group of gloo has its tensors on the host."""
    ranks = min(2, torch.cuda.device_count())
    calls = [Act(call, bytes=400, device="cuda") for call in sorted(CALLS | OBJECTS)]
    names = ("bool", "float16", "bfloat16", "int32", "int64", "complex128")
    types = [Act("allreduce", bytes=48, dtype=name, device="cuda") for name in names]
    later = [Act("allreduce", bytes=400, waits=False, device="cuda"), Act("barrier", waits=False), Act(WAIT)]
    anew = [Act(MAKE_GROUP, 1), Act("allreduce", 1, 400, device="cuda"), Act(DESTROY_GROUP, 1)]
    on_host = [Act("allreduce", 2, 8, device="cpu"), Act("all_gather_object", 2, 100, device="cpu")]
    acts = (*calls, *types, *later, *anew, *on_host)
    program = Program((tuple(range(ranks)),) * 3, (acts,) * ranks, backends=("nccl", "nccl", "gloo"))
    plan, result = tmp_path / "plan.json", tmp_path / "result.json"
    plan.write_text(codec.encode(Replay({"as written": program}, ranks, 1, "nccl", 0.1)))
    command = [sys.executable, "-m", "autoddp.worker.bench.replay", str(plan), str(result)]
    variables = environment()
    done = subprocess.run(command, env={**variables, **for_own_workers(variables)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    seconds = codec.decode(result.read_text(), Replayed).seconds["as written"]
    figure(f"ms of {len(acts)} calls on {ranks} GPU{'s' if ranks > 1 else ''}", f"{1e3 * min(seconds):.1f}")
