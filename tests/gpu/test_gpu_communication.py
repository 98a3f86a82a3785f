"""A job of NCCL ranks that communicates by itself, without DDP. The ranks share the one GPU."""

from pathlib import Path

import pytest
from test_gpu_diagnose import found, of_script

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
