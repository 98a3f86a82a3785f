"""`autoddp train.py` on a cluster: what each platform tells, what the user's words overrule, what cannot be."""

from __future__ import annotations

import argparse
import os
import socket
import threading

import pytest
from recorded import NAMES, read

from autoddp.attempts.bench_job import parse as bench
from autoddp.commandline import place as module
from autoddp.commandline.words import parse
from autoddp.errors import UsageError
from autoddp.log import tell_wrapped
from autoddp.processes import silence
from autoddp.torchrun.options import torchrun_parser


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster is here, also where the tests themselves run on one."""
    begins = (
        "SLURM",
        "PET_",
        "KUBERNETES",
        "VC_",
        "MA_",
        "SM_",
        "SKYPILOT",
        "TORCHX",
        "AZ",
        "OMPI_",
        "MPI_LOCAL",
        "PMI_",
        "JOB_COMPLETION",
        "AUTODDP",
    )
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES", "NPROC_PER_NODE")
    for name in list(os.environ):
        if name.startswith((*begins, "MASTER_")) or name in names:
            monkeypatch.delenv(name)


@pytest.fixture
def understood(monkeypatch: pytest.MonkeyPatch):
    """What a command line means where these variables are set: torchrun's options, and the lines for the user."""

    def understand(variables: dict[str, str], *words: str) -> tuple[argparse.Namespace, tuple[str, ...]]:
        with monkeypatch.context() as here:
            for name, value in variables.items():
                here.setenv(name, value)
            options = parse([*words, "train.py"])
        return options.torchrun, options.says

    return understand


def place(found: argparse.Namespace) -> tuple[object, ...]:
    return found.nnodes, found.node_rank, found.master_addr, found.master_port, found.nproc_per_node, found.rdzv_id


NO_PORT = None  # torchrun's own, 29500
TOLD = {
    "slurm-step-node1": ("2", 1, "host0", 15001, "1", "1.0"),
    "trainjob": ("2", 1, "digits-node-0-0.digits", 29500, "auto", "none"),
    "pytorchjob": ("2", 1, "digits-master-0", 23456, "4", "none"),
    "pai-dlc": ("2", 1, "dlc18isgeaydxxxx-master-0", 23456, "8", "none"),
    "skypilot": ("2", 1, "10.77.0.1", NO_PORT, "4", "sky-2026-11-01-10-00-00-000000_cluster_1"),
    "sagemaker": ("2", 1, "algo-1", NO_PORT, "8", "none"),
    "azure-ml": ("2", 1, "10.0.0.4", NO_PORT, "1", "none"),
    "model-arts": ("2", 1, "job-worker-0.job", NO_PORT, "8", "none"),
    "volcano": ("2", 1, "job-worker-0.job", NO_PORT, "1", "none"),
}
"""Situation → nodes, node rank, master, port, ranks a node and run id."""
ALONE = {
    "jobset": "give --nnodes and --master-addr for a job on several",
    "pytorchjob-without-pet": "give --nnodes and --node-rank and --master-addr",
    "torchx": "give --nnodes and --node-rank",
    "ray-train": "give --nnodes and --node-rank and --master-addr",
    "composer": "give --nnodes and --node-rank and --master-addr",
    "vertex-ai": "give --nnodes and --node-rank and --master-addr for a job on several",
    "flux": "give --nnodes and --node-rank and --master-addr for a job on several",
    "volcano-two-tasks": "give --nnodes and --node-rank and --master-addr",
    "slurm-step-on-one-node": "",
    "slurm-salloc-one-node": "",
    "slurm-shell": "",
}
"""Situation in which the job has one node, as under torchrun → the end of the line that says what is missing."""
REFUSED = {
    "slurm-batch": "put srun in front",
    "slurm-salloc": "put srun in front",
    "slurm-batch-from-a-step": "put srun in front",
    "slurm-step-of-ranks": "--ntasks-per-node=1",
    "azure-ml-ranks": "set process_count_per_instance to 1",
    "open-mpi-ranks": "mpirun --map-by ppr:1:node",
    "intel-mpi-ranks-in-slurm": "mpirun -ppn 1",
    "hyperpod-eks": "give --node-rank and --master-addr",
    "open-mpi-launchers": "it tells no master: give --master-addr",
    "mpich-launchers": "it tells no master: give --master-addr",
    "open-mpi-in-a-slurm-batch": "it tells no master: give --master-addr",
    "open-mpi-daemon-of-slurm": "it tells no master: give --master-addr",
}
"""Situation in which no job can start without a flag → the fix."""


def test_each_situation_is_tried() -> None:
    assert sorted([*TOLD, *ALONE, *REFUSED]) == NAMES


# What must stay as it is


def test_no_cluster_changes_nothing(understood) -> None:
    found, says = understood({})
    assert found == torchrun_parser().parse_args(["train.py"])
    assert says == ()


@pytest.mark.parametrize("more", [{"PET_STANDALONE": "0"}, {"PET_RDZV_ENDPOINT": ""}])
def test_an_option_that_says_nothing_keeps_no_node_from_its_place(understood, more: dict[str, str]) -> None:
    """Each node trained by itself, and wrote over what the others wrote."""
    found, _ = understood({**read("slurm-step-node1"), **more})
    assert place(found) == TOLD["slurm-step-node1"]


@pytest.mark.parametrize(
    "variables",
    [
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_NPROC_PER_NODE": "4"},
        {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "a:1"},
        {"RANK": "1"},
        {"WORLD_SIZE": "8"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        # of a torchrun around this one
        {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"NNODES": "2", "NPROC_PER_NODE": "8", "NODE_RANK": "1"},  # of a script's own
        {"JOB_COMPLETION_INDEX": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1"},
    ],
    ids=" ".join,
)
def test_variables_that_are_no_platforms_are_left_to_torchrun(understood, variables, monkeypatch) -> None:
    found, says = understood(variables)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert found == torchrun_parser().parse_args(["train.py"])
    assert says == ()


@pytest.mark.parametrize(
    "words",
    [
        ["--standalone"],
        ["--nnodes", "1"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1", "--nnodes", "2"],
        ["--rdzv-backend=c10d", "--rdzv_endpoint=a:1"],
        ["--nnodes=2", "--node-rank=0", "--master-addr=a", "--master-port=7", "--nproc-per-node=3", "--rdzv-id=x"],
        ["--nnodes=2", "--node-rank=0", "--master-addr=a"],
        ["--trials", "0"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", [name for name in NAMES if not read(name).keys() & {"PET_NNODES"}])
def test_what_the_user_says_is_not_changed(understood, name, words) -> None:
    found, _ = understood(read(name), *words)
    own = words if words[0] != "--trials" else []
    assert vars(found).items() >= vars(torchrun_parser().parse_args([*own, "train.py"])).items()
    assert vars(found) == vars(torchrun_parser().parse_args([*own, "train.py"]))


@pytest.mark.parametrize(("name", "ends"), ALONE.items())
def test_a_job_on_one_node_stays_one(understood, name, ends) -> None:
    found, says = understood(read(name))
    assert found == torchrun_parser().parse_args(["train.py"])
    assert (ends in says[0] and len(says) == 1) if ends else says == ()


# What is found


@pytest.mark.parametrize(("name", "expected"), TOLD.items())
def test_a_platform_tells_the_place(understood, name, expected) -> None:
    found, says = understood(read(name))
    assert place(found) == expected
    (line,) = says
    assert "2 nodes (" in line
    assert "this is node 1 (" in line
    assert f"the master is {expected[2]}:{expected[3] or 29500} (" in line


def test_each_thing_is_said_with_its_variable(understood) -> None:
    _, says = understood(read("slurm-step-node1"))
    assert says == (
        "Slurm: 2 nodes (SLURM_STEP_NUM_NODES), this is node 1 (SLURM_NODEID), "
        "the master is host0:15001 (SLURM_STEP_NODELIST, SLURM_JOB_ID, SLURM_STEP_ID)",
    )
    _, says = understood(read("trainjob"))
    assert says == (
        "Kubeflow: 2 nodes (PET_NNODES), this is node 1 (PET_NODE_RANK), "
        "the master is digits-node-0-0.digits:29500 (PET_MASTER_ADDR, PET_MASTER_PORT)",
    )


@pytest.mark.parametrize("name", TOLD)
def test_what_is_said_fits_a_terminal(understood, name, capsys) -> None:
    _, (line,) = understood(read(name))
    tell_wrapped(line)
    printed = capsys.readouterr().err.splitlines()
    assert max(map(len, printed)) <= 80
    assert " ".join(one.removeprefix("autoddp: ").strip() for one in printed) == line


@pytest.mark.parametrize("name", [name for name in TOLD if name not in ("trainjob", "pytorchjob")])
@pytest.mark.parametrize("variable", [False, True], ids=["flag", "PET"])
def test_one_flag_overrules_one_answer(understood, name, variable) -> None:
    def told(option: str, value: str) -> tuple[object, ...]:
        pet = {f"PET_{option[2:].upper().replace('-', '_')}": value}
        found, (line,) = understood(read(name) | (pet if variable else {}), *([] if variable else [option, value]))
        assert (next(iter(pet)) if variable else option) in line
        return place(found)

    nodes, rank, master, port, ranks, run = TOLD[name]
    assert told("--nnodes", "3") == ("3", rank, master, port, ranks, run)
    assert told("--node-rank", "0") == (nodes, 0, master, port, ranks, run)
    assert told("--master-addr", "m") == (
        nodes,
        rank,
        "m",
        None,
        ranks,
        run,
    )  # torchrun's port, as with this flag there
    assert told("--master-port", "7") == (nodes, rank, master, 7, ranks, run)


def test_a_flag_for_what_is_missing_completes_the_place(understood) -> None:
    found, _ = understood(read("hyperpod-eks"), "--node-rank", "1", "--master-addr", "m")
    assert place(found) == ("2", 1, "m", None, "8", "none")
    found, _ = understood(read("jobset"), "--nnodes", "2", "--master-addr", "m")
    assert place(found) == ("2", 1, "m", None, "1", "none")
    for name in ("open-mpi-launchers", "mpich-launchers"):
        found, _ = understood(read(name), "--master-addr", "m")
        assert place(found) == ("2", 1, "m", None, "1", "none")


def test_mpirun_inside_slurm_leaves_the_place_to_slurm(understood) -> None:
    found, (line,) = understood(read("mpich-launchers") | read("slurm-step-node1"))
    assert place(found) == TOLD["slurm-step-node1"]
    assert line.startswith("Slurm: ")


def test_open_mpi_inside_slurm_numbers_the_nodes_itself(understood) -> None:
    """Its daemons are a step without mpirun's own node: the others met in a job of their own, one of two alone."""
    for name, rank in (("open-mpi-in-a-slurm-batch", 0), ("open-mpi-daemon-of-slurm", 2)):
        for words in (["--master-addr", "m"], ["--master-addr", "m", "--nnodes", "3"]):
            found, (line,) = understood(read(name), *words)
            assert place(found) == ("3", rank, "m", None, "1", "none")
            assert line.startswith("mpirun: 3 nodes (")


def test_the_number_of_ranks_that_a_platform_tells_counts_as_given(monkeypatch) -> None:
    for name, value in read("skypilot").items():
        monkeypatch.setenv(name, value)
    for ranks in ("4", "1"):  # torchrun's own number too
        monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", ranks)
        assert parse(["train.py"]).ranks_given
    monkeypatch.delenv("SKYPILOT_NUM_GPUS_PER_NODE")
    assert not parse(["train.py"]).ranks_given


def test_a_broken_variable_that_nobody_needs_stops_nothing(understood) -> None:
    inside = read("slurm-step-node1") | read("skypilot") | {"SLURM_NODEID": "x"}
    assert place(understood(inside)[0]) == TOLD["skypilot"]
    found, _ = understood(read("slurm-step-node1") | {"SLURM_NODEID": "x"}, "--node-rank", "1")
    assert place(found) == TOLD["slurm-step-node1"]


def test_bench_finds_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in read("skypilot").items():
        monkeypatch.setenv(name, value)
    request = bench(["--budget", "9s"])
    assert place(request.torchrun) == TOLD["skypilot"]
    assert request.says.startswith("SkyPilot: 2 nodes (SKYPILOT_NUM_NODES), this is node 1 (SKYPILOT_NODE_RANK)")
    assert bench(["--nnodes", "1", "--nproc-per-node", "2"]).says == ""


# Several platforms at once


@pytest.mark.parametrize("inner", ["skypilot", "pai-dlc", "trainjob", "pytorchjob", "sagemaker"])
@pytest.mark.parametrize("outer", ["slurm-step-node1", "slurm-batch", "jobset"])
def test_the_innermost_counts_and_that_is_said(understood, inner, outer) -> None:
    found, (line,) = understood(read(outer) | read(inner))
    assert place(found) == TOLD[inner]
    assert ("(inside Slurm, which is not asked): " in line) == outer.startswith("slurm")


def test_torchx_on_slurm_has_torchxs_master_and_slurms_nodes(understood) -> None:
    found, (line,) = understood(read("slurm-step-node1") | read("torchx"))
    assert place(found)[5] == "slurm-torchx-17"  # a name for a folder, which torch makes of it
    assert place(found)[:4] == ("2", 1, "n01", 15001)  # node 0, where TorchX may be silent, takes Slurm's port too
    assert line.startswith("TorchX and Slurm: ")


def test_different_numbers_of_nodes_are_refused(understood) -> None:
    both = read("slurm-step-node1") | read("skypilot") | {"SKYPILOT_NUM_NODES": "4"}
    with pytest.raises(UsageError, match="SKYPILOT_NUM_NODES=4 of SkyPilot, but SLURM_STEP_NUM_NODES=2 of Slurm"):
        understood(both)
    found, _ = understood(both, "--nnodes", "2")
    assert place(found)[:3] == ("2", 1, "10.77.0.1")


# What cannot be


@pytest.mark.parametrize(("name", "fix"), REFUSED.items())
def test_a_launcher_that_cannot_take_its_place_says_the_fix(understood, name, fix) -> None:
    with pytest.raises(UsageError) as refused:
        understood(read(name))
    assert fix in str(refused.value)
    assert "--nnodes 1" in str(refused.value)
    assert "\n" not in str(refused.value)
    understood(read(name), "--nnodes", "1")


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("slurm-step-node1", {"SLURM_NODEID": "x"}, "SLURM_NODEID='x' of Slurm: must be a whole number of 0 or more"),
        ("slurm-step-node1", {"SLURM_NODEID": "2"}, "SLURM_NODEID makes this node 2, but SLURM_STEP_NUM_NODES=2"),
        ("slurm-step-node1", {"SLURM_STEP_NODELIST": "n[a-c]"}, "name that node by --master-addr"),
        ("slurm-step-node1", {"SLURM_STEP_NODELIST": "host[0-"}, "SLURM_STEP_NODELIST='host[0-'"),
        ("slurm-step-node1", {"SLURM_STEP_NODELIST": "host[1,0]"}, "SLURM_NODEID=1 on SLURMD_NODENAME=host1"),
        ("slurm-step-node1", {"SLURM_JOB_ID": "-1"}, "SLURM_JOB_ID='-1' of Slurm"),
        ("skypilot", {"SKYPILOT_NUM_NODES": "two"}, "SKYPILOT_NUM_NODES='two' of SkyPilot"),
        ("skypilot", {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK makes this node 2"),
        ("sagemaker", {"SM_HOSTS": "algo-1,algo-2"}, "must be a list of names in JSON"),
        ("sagemaker", {"SM_HOSTS": "[]"}, "must be a list of names in JSON"),
        ("sagemaker", {"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST=algo-3 is not in SM_HOSTS"),
        ("pai-dlc", {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 of PAI-DLC: must be a port"),
        ("pai-dlc", {"WORLD_SIZE": "0"}, "WORLD_SIZE='0' of PAI-DLC: must be a whole number of 1 or more"),
        ("model-arts", {"MA_NUM_GPUS": "²"}, "MA_NUM_GPUS='²' of ModelArts"),
        ("azure-ml", {"AZ_BATCH_MASTER_NODE": ""}, "it tells no master: give --master-addr"),
    ],
)
def test_a_variable_that_cannot_be_is_named_with_its_value_and_the_fix(understood, name, changed, says) -> None:
    with pytest.raises(UsageError) as refused:
        understood(read(name) | changed)
    assert says in str(refused.value)
    assert "--" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_jobs_have_two_ports(understood) -> None:
    """Also two steps of one job, and jobs whose numbers follow each other."""

    def port(job: int, step: int) -> int:
        found, _ = understood(read("slurm-step-node1") | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        assert 15_000 <= found.master_port < 30_000
        return int(found.master_port)

    ports = [port(job, step) for job in range(4_000_000, 4_000_010) for step in range(10)]
    assert len(set(ports)) == len(ports)


def test_a_name_service_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several silent name servers are asked for half a minute or more before there is an answer."""
    told, lines = threading.Event(), list[str]()

    def tell(line: str) -> None:
        lines.append(line)
        told.set()

    def resolve(*_: object) -> None:
        assert told.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(silence, "tell", tell)
    monkeypatch.setattr(silence, "_LOOKS", 0.01)
    monkeypatch.setattr(module, "_SOON", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    master = argparse.Namespace(master_resolves=True, master_addr="algo-1", master_from="SM_HOSTS")
    with pytest.raises(UsageError, match=r"knows no address of that name \(Temporary failure"):
        module.require_master(master)
    assert lines[0].startswith("waiting for the name service to tell the address of the master, algo-1")


def test_a_master_whose_name_no_host_can_have_is_one_line(understood) -> None:
    """As of a template whose part before the dot was empty: Python's own error for it was a traceback."""
    found, _ = understood(read("azure-ml") | {"AZ_BATCH_MASTER_NODE": ".internal:6000"})
    with pytest.raises(UsageError, match=r"^AZ_BATCH_MASTER_NODE names the master \.internal, .*: give its address by"):
        module.require_master(found)
