"""What NCCL makes of the settings that are offered, and where its threads run."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from launchers import environment

from autoddp.knobs import Configuration
from autoddp.topology.nccl_tuner import nccl_tuner
from autoddp.topology.probe import probe
from autoddp.topology.start_settings import nccl_settings
from autoddp.worker.binding import Binding

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
COLLECTIVES = """
import os, torch, torch.distributed as dist
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
values = torch.ones(2**20, device=device)
dist.broadcast(values, 0)
dist.all_reduce(values)
assert values.mean().item() == dist.get_world_size()
dist.destroy_process_group()
"""


def test_no_setting_that_is_offered_ends_a_job(needs_gpus, figure, tmp_path):
    """On every GPU here, with the broadcast that DDP begins with. A world of one would not choose an algorithm."""
    needs_gpus(2)
    script = tmp_path / "collectives.py"
    script.write_text(COLLECTIVES)
    version, failed = tuple(torch.cuda.nccl.version()), []
    settings = nccl_settings(probe(), 2, {}, version, nccl_tuner(os.environ))
    for setting in settings:
        variables = Configuration(setting).start_variables
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torch.cuda.device_count())]
        done = subprocess.run([sys.executable, *words, str(script)], env=environment(**variables), capture_output=True)
        if done.returncode:
            failed.append(variables)
    figure("settings", len(settings))
    assert failed == []


def test_threads_of_nccl_do_not_forbid_binding(nccl, gpu, figure):
    """They may have the GPU's mask; the rank is judged by its main thread."""
    dist.all_reduce(torch.ones(1, device=gpu))
    torch.cuda.synchronize(gpu)
    masks = {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in os.listdir("/proc/self/task")}
    binding = Binding(gpu)
    figure("masks", len(masks))
    figure("binding", binding.why_not or "possible")
    if "NUMA node" in binding.why_not:
        pytest.skip(f"needs a machine with several NUMA nodes: {binding.why_not}")
    before = os.sched_getaffinity(0)
    binding.turn(True)
    assert os.sched_getaffinity(0) < before
    binding.turn(False)
    assert os.sched_getaffinity(0) == before
