"""How many ranks a host starts where nobody says it, and what counts as having said it."""

import argparse
import os

import forks
import pytest
import torch
from launchers import environment

from autoddp.commandline.local_fingerprint import visible_gpus
from autoddp.commandline.mode import choose
from autoddp.commandline.rank_count import idle_gpus, set_one, set_ranks, usable_nodes
from autoddp.commandline.words import parse
from autoddp.errors import UsageError
from autoddp.topology import NumaNode, numa_nodes
from autoddp.topology.system.machine import cpu
from autoddp.torchrun.options import node_range, torchrun_parser

GIVEN = {
    "--nproc-per-node 1 train.py": True,
    "--nproc_per_node=auto train.py": True,
    "--nproc-per 1 train.py": True,
    "train.py": False,
    "train.py --nproc-per-node 4": False,  # the script's
    "--standalone train.py": False,
    "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint localhost:0 train.py": False,
    "--trials 0 train.py": False,
}


@pytest.mark.parametrize("words", GIVEN)
def test_what_counts_as_a_number(words, monkeypatch):
    request = parse(words.split())
    assert request.ranks_given is GIVEN[words]
    assert GIVEN[words] or request.torchrun.nproc_per_node == "1"
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    assert parse(words.split()).ranks_given


@pytest.mark.parametrize("trials", ["0", "3"])
def test_a_standalone_job_on_a_node_of_a_cluster(trials, monkeypatch):
    """Kubeflow numbers its nodes by this variable, which torchrun itself does not read for such a job."""
    monkeypatch.setenv("PET_NODE_RANK", "1")
    words = ["--standalone", "--nnodes", "1", "--nproc-per-node", "2", "--trials", trials, "train.py"]
    assert choose(parse(words)).as_torchrun is (trials == "0")


def test_a_standalone_job_is_on_one_host_whatever_the_range_is():
    """No other host can come. It met other jobs of this host at torchrun's usual port, or found the port taken."""
    options = parse(["--standalone", "--nnodes", "1:3", "--nproc-per-node", "2", "--trials", "3", "train.py"])
    assert not choose(options).several_nodes
    assert node_range(options.torchrun) == (1, 1)


@pytest.mark.skipif(torchrun_parser().get_default("master_port") is not None, reason="an older torch reads it")
@pytest.mark.parametrize("trials", ["0", "3"])
def test_the_rank_of_a_node_that_torchrun_does_not_read(trials):
    """As of `--nnodes=1 --node-rank=$NODE_RANK` on the second node of several: torchrun starts a job there."""
    words = ["--nnodes", "1", "--node-rank", "1", "--nproc-per-node", "2", "--trials", trials, "train.py"]
    assert choose(parse(words)).as_torchrun is (trials == "0")
    with pytest.raises(UsageError, match="--node-rank 1: must be from 0 to 0"):
        choose(parse(["--master-port", "29700", *words]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_into_which_no_worker_gets_are_launched_as_by_torchrun(method):
    words = ["--nproc-per-node", "2", "--run-path", "--start-method", method, "train.py"]
    mode = choose(parse(words))
    assert mode.as_torchrun is (method == "fork")
    assert ("without tuning and without a recipe" in mode.says) is (method == "fork")


def test_as_many_ranks_are_forked_as_by_torchrun(monkeypatch):
    """A script without DDP, which tuning would have seen, would be run once by each."""
    monkeypatch.setattr("autoddp.commandline.rank_count.visible_gpus", lambda: 8)
    options = parse(["--run-path", "--start-method", "fork", "train.py"])
    mode = choose(options)
    assert options.torchrun.nproc_per_node == "1"
    assert mode.ranks.startswith("1 rank, as under torchrun, on a host with 8 visible GPUs")


NODES = {
    # the CPU lists of its NUMA nodes, the CPUs of this process, nodes on which it may run
    "one": (["0-7"], range(8), 1),
    "two": (["0-3", "4-7"], range(8), 2),
    "eight": ([f"{cpu}" for cpu in range(8)], range(8), 8),
    "one with memory alone": (["0-3", "4-7", ""], range(8), 2),
    "bound to one of two": (["0-3", "4-7"], (5, 6), 1),
    "interleaved": (["0,2,4", "1,3,5"], (0, 1), 2),
    "none that the kernel lists": ([], range(8), 0),
}


@pytest.mark.parametrize("name", NODES)
def test_numa_nodes_on_which_this_process_may_run(name):
    lists, allowed, usable = NODES[name]
    assert usable_nodes([NumaNode(number, cpus) for number, cpus in enumerate(lists)], allowed) == usable


def test_on_this_host():
    torchrun = argparse.Namespace(nproc_per_node="1")
    says = set_ranks(torchrun)
    gpus, nodes = torch.cuda.device_count(), usable_nodes(numa_nodes(), os.sched_getaffinity(0))
    assert visible_gpus() == gpus
    assert torchrun.nproc_per_node == str(gpus or max(2, nodes))
    assert says.startswith(f"{torchrun.nproc_per_node} rank")
    assert bool(idle_gpus()) is (gpus > 1)
    set_one(torchrun)
    assert torchrun.nproc_per_node == "1"


def test_a_system_without_affinity(monkeypatch):
    """As macOS."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr("autoddp.commandline.rank_count.visible_gpus", lambda: 0)
    torchrun = argparse.Namespace(nproc_per_node="1")
    set_ranks(torchrun)
    assert torchrun.nproc_per_node == "2"
    assert cpu().usable == os.cpu_count()


def test_one_rank_is_launched_for_two_reasons():
    torchrun = argparse.Namespace(nproc_per_node="8")
    says = set_one(torchrun, is_known=False)
    assert torchrun.nproc_per_node == "1"
    assert "tuning ended before the script could build a DistributedDataParallel model" in says
    assert says.endswith("start it with --nproc-per-node 8")
    assert "no DistributedDataParallel model was seen" in set_one(argparse.Namespace(nproc_per_node="8"))


@pytest.mark.parametrize(
    ("gpus", "line"), [(1, "1 rank on this host, one per visible GPU"), (8, "8 ranks on this host")]
)
def test_on_a_host_with_gpus(gpus, line, monkeypatch):
    """Where torch counts so many: no host of the tests has eight."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    torchrun = argparse.Namespace(nproc_per_node="1")
    assert set_ranks(torchrun).startswith(line)
    assert torchrun.nproc_per_node == str(gpus)
    idle = "1 rank, as under torchrun, on a host with 8 visible GPUs; --nproc-per-node sets another number"
    assert idle_gpus() == (idle if gpus > 1 else "")


def test_the_number_is_said_on_lines_that_fit_a_terminal(tmp_path):
    (tmp_path / "train.py").write_text("")
    done = forks.run(["-m", "autoddp", "--dry-run", "train.py"], cwd=tmp_path, env=environment())
    lines = done.stderr.splitlines()
    assert " on this host, " in lines[0]
    assert lines[-1].endswith("sets another number")
    assert max(map(len, lines)) <= 80
