"""What NCCL makes of the settings that are offered, what it says of its transports, and where its threads run."""

import contextlib
import os
import re
import subprocess
import sys
from os import sched_getaffinity  # the system's own: under a binding the script is given another answer

import pytest
import torch
import torch.distributed as dist
from launchers import environment

from autoddp.attempts.env_screening import Screening
from autoddp.bench.burst import Burst
from autoddp.knobs import Configuration
from autoddp.knobs.env import TREES, NodeAndJob, start_settings
from autoddp.network.own_network import VARIABLES, Network
from autoddp.runs.nccl_logs import transports, variables
from autoddp.topology.facts import NumaNode
from autoddp.topology.nccl.tuner import nccl_tuner
from autoddp.topology.probe import probe
from autoddp.topology.verdict import between_nodes
from autoddp.torchrun.options import torchrun_parser
from autoddp.worker.effects import binding
from autoddp.worker.effects.binding import Binding

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


def run_collectives(folder, settings, **options):
    """One rank for each GPU, with these variables: what is over when it is over."""
    script = folder / "collectives.py"
    script.write_text(COLLECTIVES)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torch.cuda.device_count())]
    command = [sys.executable, *words, str(script)]
    return subprocess.run(command, env=environment(**settings), capture_output=True, text=True, **options)


def test_no_setting_that_is_offered_ends_a_job(needs_gpus, figure, tmp_path):
    """On every GPU here, with the broadcast that DDP begins with. A world of one would not choose an algorithm."""
    needs_gpus(2)
    version = tuple(torch.cuda.nccl.version())
    offered = [
        Configuration(setting).start_variables
        for setting in start_settings(NodeAndJob(probe(), 2, {}, version, nccl_tuner(os.environ)))
    ]
    figure("settings", len(offered))
    assert [settings for settings in offered if run_collectives(tmp_path, settings).returncode] == []


def test_the_short_benchmark_rules_out_what_ends_a_job(gpu, figure, tmp_path):
    """As "Tree" does from NCCL 2.24 on, by DDP's first broadcast. With one GPU nothing is chosen, and all pass."""
    count = torch.cuda.device_count()
    torchrun = torchrun_parser().parse_args(["--nproc-per-node", str(count), "train.py"])
    screening = Screening(torchrun, tmp_path / "screening", environment())
    trees = TREES if torch.cuda.nccl.version() >= (2, 24) else "Tree"
    for algorithm in dict.fromkeys(("Ring", "Tree", trees)):
        settings = {"NCCL_ALGO": algorithm}
        seconds = screening._seconds(Burst.of_step(2**24, "nccl"), settings)
        served = run_collectives(tmp_path, settings).returncode == 0
        figure(algorithm, f"{1e3 * min(seconds):.2f} ms" if seconds else "none")
        assert bool(seconds) is served, algorithm
    assert seconds  # by trees for the all-reduces alone
    figure("GPUs", count)


def test_the_log_of_a_real_run_stands_beside_the_prediction(gpu, figure, tmp_path, monkeypatch):
    """With one GPU there is no connection to tell of, and what else NCCL says is read."""
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "attempt0").mkdir()
    done = run_collectives(tmp_path, variables(tmp_path / "attempt0"))
    assert done.returncode == 0, done.stderr[-3000:]
    found, count = transports(tmp_path, probe()), torch.cuda.device_count()
    said = [f"{way['between']} {way['predicted']}: {'+'.join(way['used'])}" for way in found["ways"]]
    figure("predicted and used", "; ".join(said) or "no connections of one GPU")
    figure("findings", "; ".join(found["findings"]) or "none")
    assert str(found["nccl"]["nccl_version"]).startswith(".".join(map(str, torch.cuda.nccl.version())))
    assert found["nccl"]["nranks"] == count
    assert not found["nccl"]["missing"]
    assert bool(found["ways"]) is (count > 1)
    assert all(way["predicted"] for way in found["ways"])


def test_nccl_takes_the_interface_of_the_whole_name_alone(gpu, figure, tmp_path):
    """As several hosts name it. Of the loopback NCCL takes no beginning of a name, and here it is always there."""
    variables = Network("lo", told=VARIABLES).variables
    done = run_collectives(tmp_path, {**variables, "NCCL_DEBUG": "INFO", "NCCL_NET": "Socket"})
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (done.stdout + done.stderr).splitlines()
    used = {line.partition(" : Using ")[2] for line in lines if "NET/Socket : Using " in line}
    figure("used", " ".join(sorted(used)))
    assert [re.findall(r"\[[0-9]+\]([^:]+):", line) for line in used] == [["lo"]]


def test_links_that_come_and_go_are_told_with_what_outlasts_them(gpu, figure, tmp_path):
    """And NCCL takes the two variables."""
    node = probe()
    active = [port for port in node.rdma if port.active]
    if not active:
        pytest.skip("needs an InfiniBand or RoCE port that is active, and here is none")
    told = between_nodes(node).holds_back
    figure("links lost", {port.device: port.link_downed for port in active})
    for port in active:
        assert (f"{port.device} has lost its link" in told) is ((port.link_downed or 0) >= 2)
    settings = {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7", "NCCL_DEBUG": "INFO"}
    if torch.cuda.device_count() > 1:  # else no connection asks for them
        settings |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "IB"}
    done = run_collectives(tmp_path, settings)
    assert done.returncode == 0, done.stderr[-3000:]
    if "NCCL_NET" in settings:
        assert "NCCL_IB_TIMEOUT set by environment to 22" in done.stdout + done.stderr


def masks():
    """Of this process's threads."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found[thread] = sched_getaffinity(int(thread))
    return found


def test_binding_leaves_threads_of_nccl_where_they_are(nccl, gpu, figure, monkeypatch):
    """The machine's CPUs are taken for two NUMA nodes, so that it need not have several."""
    dist.all_reduce(torch.ones(1, device=gpu))
    torch.cuda.synchronize(gpu)
    cpus = sorted(sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip(f"needs two CPUs, and here are {len(cpus)}")
    halves = cpus[: len(cpus) // 2], cpus[len(cpus) // 2 :]
    nodes = [NumaNode(number, ",".join(map(str, half))) for number, half in enumerate(halves)]
    monkeypatch.setattr(binding, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(binding, "_node_of_gpu", lambda device: 0)
    for name in binding._OTHERS:
        monkeypatch.delenv(name, raising=False)
    before, main = masks(), sched_getaffinity(0)
    bound = Binding(gpu)
    assert bound.why_not == ""
    try:
        bound.bind(True)
        meanwhile = masks()
    finally:
        bound.bind(False)
    after = masks()
    stayed = [thread for thread, mask in before.items() if mask != main]
    figure("threads", len(before))
    figure("placed by others", len(stayed))
    for thread in before.keys() & meanwhile.keys() & after.keys():
        assert meanwhile[thread] == (before[thread] if thread in stayed else set(halves[0]))
        assert after[thread] == before[thread]


def test_threads_of_nccl_do_not_forbid_binding(nccl, gpu, figure):
    """They may have the GPU's mask; the rank is judged by its main thread."""
    dist.all_reduce(torch.ones(1, device=gpu))
    torch.cuda.synchronize(gpu)
    masks = {tuple(sorted(sched_getaffinity(int(thread)))) for thread in os.listdir("/proc/self/task")}
    binding = Binding(gpu)
    figure("masks", len(masks))
    figure("binding", binding.why_not or "possible")
    if "NUMA node" in binding.why_not:
        pytest.skip(f"needs a machine with several NUMA nodes: {binding.why_not}")
    before = sched_getaffinity(os.getpid())
    binding.bind(True)
    assert sched_getaffinity(os.getpid()) < before
    binding.bind(False)
    assert sched_getaffinity(os.getpid()) == before
