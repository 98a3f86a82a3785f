"""What only a GPU can be slow by: each cause is planted in a job of one or two gloo ranks on the one GPU."""

import json

import pytest
from launchers import AUTODDP, ROOT, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240), pytest.mark.alone]
JOBS = ROOT / "benchmarks" / "jobs" / "slow"


def diagnosed(tmp_path, job, *words, ranks=2):
    return of_script(tmp_path, [str(JOBS / f"{job}.py"), "--steps", "1000000"], *words, ranks=ranks)


def of_script(tmp_path, script, *words, ranks):
    options = ["--standalone", "--nproc-per-node", str(ranks), "--json", *words]
    launch = start(AUTODDP, tmp_path / "run", ["diagnose", *options, *script])
    try:
        launch.process.wait(220)
    finally:
        launch.kill()
    assert launch.returncode == 0, launch.stderr[-3000:]
    return json.loads(launch.stdout)


def found(diagnosis, cause, figure):
    """The finding, which has to be there."""
    ours = [one for one in diagnosis["findings"] if one["cause"] == cause]
    figure("first", diagnosis["findings"][0]["cause"] if diagnosis["findings"] else "nothing")
    if diagnosis["step_ms"] is not None:
        figure("step", f"{diagnosis['step_ms']:.1f} ms")
    for rank in diagnosis["ranks"] if not ours else ():
        figure(f"rank {rank['rank']}", rank)
    print(diagnosis["verdict"], *(one["text"] for one in diagnosis["findings"]), sep="\n")
    assert ours, diagnosis["verdict"]
    figure(cause, f"{ours[0]['status']} {ours[0]['ms']:.1f} ms")
    return ours[0]


# Two ranks share the GPU: while one waits the other one computes, so waiting may cost nothing. What an idle GPU costs
# is looked for with one rank.


def test_small_kernels(gpu, tmp_path, figure):
    one = found(diagnosed(tmp_path, "small_kernels", ranks=1), "launch_bound", figure)
    assert "CUDA graphs" in one["text"]


def test_small_kernels_replayed(gpu, tmp_path, figure):
    diagnosis = diagnosed(tmp_path, "small_kernels", "--cuda-graphs", ranks=1)
    assert found(diagnosis, "launch_bound", figure)["status"] == "proved"


def test_copies_from_pageable_memory(gpu, tmp_path, figure):
    one = found(diagnosed(tmp_path, "host_device_copy"), "host_device_copy", figure)
    assert one["status"] == "proved"


def test_lines_that_wait_for_the_device(gpu, tmp_path, figure):
    one = found(diagnosed(tmp_path, "sync_points", ranks=1), "sync_points", figure)
    assert "sync_points.py:" in one["text"]
    assert "float()" in one["text"]


def test_stages_add_up_to_the_step(gpu, tmp_path, figure):
    for rank in diagnosed(tmp_path, "host_device_copy")["ranks"]:
        parts = ("data", "copy", "buffers", "forward", "backward", "exposed", "optimizer", "other")
        share = sum(rank[f"{name}_ms"] for name in parts) / rank["step_ms"]
        figure(f"rank {rank['rank']}", f"{share:.3f} of the step")
        assert share == pytest.approx(1, rel=0.05)


def test_a_rank_that_all_wait_for_is_proved(gpu, tmp_path, figure):
    """Its delay lies on the stream too, since a host that runs ahead makes up for a sleep."""
    one = found(diagnosed(tmp_path, "straggler"), "straggler", figure)
    assert one["status"] == "proved"
