"""A rank's threads on the CPUs of one NUMA node, and back; in a process of its own, for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import forks
import pytest
import torch
from launchers import environment, holds_numa_nodes, list_numa_nodes, may_mount

from autoddp.topology import cpus
from autoddp.topology.facts import NumaNode
from autoddp.topology.system import machine
from autoddp.worker.effects import binding

CPUS = sorted(os.sched_getaffinity(0))

TURNS = """
import json, os, threading
import torch
from autoddp.worker.effects.binding import Binding

asked = os.sched_getaffinity  # the system's own

def now():
    return [sorted(asked(int(t))) for t in os.listdir("/proc/self/task")]

stop = threading.Event()
threading.Thread(target=stop.wait).start()
binding = Binding(torch.device("cpu"))
seen = [now()]
for on in (True, False):
    binding.bind(on)
    seen.append(now())
stop.set()
print(json.dumps({"why": binding.why_not, "seen": [[list(x) for x in {tuple(y) for y in s}] for s in seen]}))
"""


# Each machine's script is a fork of this program, which is in a mount namespace of its own and has imported torch.
ON_EACH_MACHINE = f"""
import json, os, subprocess, sys
import torch
for place, (nodes, variables) in json.loads(sys.argv[1]).items():
    subprocess.run(["mount", "--bind", nodes, "/sys/devices/system/node"], check=True)
    if os.fork() == 0:
        os.environ.update(variables)
        sys.stdout = open(place, "w")
        exec({TURNS!r})
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    subprocess.run(["umount", "/sys/devices/system/node"], check=True)
"""

BOTH_NODES = [str(cpu) for cpu in CPUS[:2]]
# what the kernel lists of each NUMA node, the variables of the script, why it is not bound
MACHINES = {
    "rank 0": (BOTH_NODES, {"LOCAL_RANK": "0"}, ""),
    "rank 1": (BOTH_NODES, {"LOCAL_RANK": "1"}, ""),
    "one node": (["0-1023"], {}, "its CPUs are on one NUMA node"),
    "bound by OpenMP": (["0", "1-1023"], {"OMP_PROC_BIND": "false"}, "OMP_PROC_BIND is set"),
    "one rank": (
        ["0", "1-1023"],
        {"LOCAL_WORLD_SIZE": "1"},
        "fewer ranks than NUMA nodes: binding would leave CPUs idle",
    ),
    "nonsense": (["nonsense", ""], {}, "its CPUs are on one NUMA node"),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The folder in which each machine's script has left what it saw."""
    if not may_mount():
        pytest.skip("needs root, mounts of its own (unshare -m) and two CPUs")
    folder = tmp_path_factory.mktemp("machines")
    machines = {}
    for name, (nodes, variables, _) in MACHINES.items():
        listed = list_numa_nodes(folder / f"nodes of {name}", *nodes)
        machines[str(folder / name)] = (str(listed), {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **variables})
    with holds_numa_nodes(folder / "nodes", *BOTH_NODES) as host:
        done = forks.run(["-c", ON_EACH_MACHINE, json.dumps(machines)], env=environment(), host=host)
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


@pytest.mark.parametrize("name", MACHINES)
def test_ranks_are_dealt_out_over_the_nodes_or_left_as_they_are_with_the_reason(seen, name):
    folder, errors = seen
    text = (folder / name).read_text()
    assert text, errors
    why = MACHINES[name][2]
    bound = CPUS if why else [CPUS[name == "rank 1"]]
    assert json.loads(text) == {"why": why, "seen": [[CPUS], [bound], [CPUS]]}


def two_nodes(monkeypatch):
    """Let this rank be the first of two, on a machine with two nodes; the CPUs of each node, and of both."""
    monkeypatch.setattr(os, "sched_getaffinity", os.sched_getaffinity)  # as it is now, it is put back
    nodes = {CPUS[0]}, {CPUS[1]}
    monkeypatch.setattr(machine, "numa_nodes", lambda: [NumaNode(i, str(*cpus)) for i, cpus in enumerate(nodes)])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return *nodes, os.sched_getaffinity(0)


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_threads_that_somebody_else_has_placed_stay_there(monkeypatch):
    """NCCL's threads for the network have the mask of the GPU, also where the script binds nothing."""
    first, second, both = two_nodes(monkeypatch)
    ready, over = threading.Barrier(3), threading.Event()
    threads = {}

    def run(name, cpus):
        os.sched_setaffinity(0, cpus)
        threads[name] = threading.get_native_id()
        ready.wait()
        over.wait()

    asked = os.sched_getaffinity  # the system's own

    def masks():
        return {name: asked(thread) for name, thread in [("main", os.getpid()), *threads.items()]}

    running = [threading.Thread(target=run, args=given) for given in (("near", first), ("far", second))]
    for thread in running:
        thread.start()
    try:
        ready.wait()
        bound = binding.Binding(torch.device("cpu"))
        assert bound.why_not == ""
        bound.bind(True)
        assert masks() == {"main": first, "near": first, "far": second}
        for own in (0, os.getpid()):  # by this the script chooses how many workers its loaders have
            assert os.sched_getaffinity(own) == both
        bound.bind(False)
        assert masks() == {"main": both, "near": first, "far": second}
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), both)
        over.set()
        for thread in running:
            thread.join()


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_workers_that_a_rank_has_started_move_with_it(monkeypatch):
    """Those of the launched job start when it is bound: free ones would make a trial promise what it does not keep."""
    first, second, both = two_nodes(monkeypatch)
    workers = []

    def start():
        workers.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return workers[-1].pid

    try:
        usual, placed = start(), start()
        os.sched_setaffinity(placed, second)
        bound = binding.Binding(torch.device("cpu"))
        bound.bind(True)
        late, late_placed = start(), start()
        os.sched_setaffinity(late_placed, second)
        every = (usual, placed, late, late_placed)
        assert [os.sched_getaffinity(one) for one in every] == [first, second, first, second]
        bound.bind(False)
        assert [os.sched_getaffinity(one) for one in every] == [both, second, both, second]
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), both)
        for worker in workers:
            worker.kill()
            worker.communicate()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-2,5", {0, 1, 2, 5}), ("7", {7}), ("", set()), ("a-b", set()), ("3-", {3}), ("0x4", set())],
)
def test_lists_of_cpus(text, expected):
    assert cpus(NumaNode(0, text)) == expected


def test_without_a_model_the_first_step_on_the_device_binds(monkeypatch):
    """The meta device stands for a GPU."""
    seen = []

    class Noted:
        why_not = ""

        def __init__(self, device):
            self.device = device

        def bind(self, on):
            seen.append((self.device, on))

    def steps(tensor):
        torch.optim.SGD([torch.nn.Parameter(tensor)], 0.1).step()

    monkeypatch.setattr(binding, "Binding", Noted)
    binding.bind_without_a_model("meta")
    steps(torch.zeros(1))
    assert seen == []
    steps(torch.zeros(1, device="meta"))
    steps(torch.zeros(1, device="meta"))
    assert seen == [(torch.device("meta"), True)]
    binding.bind_without_a_model("cpu")
    assert seen[1:] == [(torch.device("cpu"), True)]
