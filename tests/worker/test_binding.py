"""A rank's threads on the CPUs of one NUMA node, and back; in a process of its own, for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from launchers import may_mount, on_numa_nodes

from autoddp.topology import cpus
from autoddp.topology.facts import NumaNode
from autoddp.worker import binding

CPUS = sorted(os.sched_getaffinity(0))

TURNS = """
import json, os, threading
import torch
from autoddp.worker.binding import Binding

def now():
    return [sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")]

stop = threading.Event()
threading.Thread(target=stop.wait).start()
binding = Binding(torch.device("cpu"))
seen = [now()]
for on in (True, False):
    binding.turn(on)
    seen.append(now())
stop.set()
print(json.dumps({"why": binding.why_not, "seen": [[list(x) for x in {tuple(y) for y in s}] for s in seen]}))
"""


def in_a_machine(tmp_path, nodes, **variables):
    """What the script sees on a machine with these NUMA nodes."""
    command = [*on_numa_nodes(tmp_path, *nodes), sys.executable, "-c", TURNS]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_mounts = pytest.mark.skipif(not may_mount(), reason="needs root, mounts of its own (unshare -m) and two CPUs")


@needs_mounts
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_are_dealt_out_over_the_nodes(tmp_path, rank):
    first, second = CPUS[0], CPUS[1]
    found = in_a_machine(tmp_path, [str(first), str(second)], LOCAL_RANK=str(rank))
    assert found == {"why": "", "seen": [[CPUS], [[(first, second)[rank]]], [CPUS]]}


@needs_mounts
@pytest.mark.parametrize(
    ("nodes", "variables", "why"),
    [
        (["0-1023"], {}, "its CPUs are on one NUMA node"),
        (["0", "1-1023"], {"OMP_PROC_BIND": "false"}, "OMP_PROC_BIND is set"),
        (["0", "1-1023"], {"LOCAL_WORLD_SIZE": "1"}, "fewer ranks than NUMA nodes: binding would leave CPUs idle"),
        (["nonsense", ""], {}, "its CPUs are on one NUMA node"),
    ],
)
def test_left_as_it_is_with_the_reason(tmp_path, nodes, variables, why):
    assert in_a_machine(tmp_path, nodes, LOCAL_RANK="0", **variables) == {"why": why, "seen": [[CPUS]] * 3}


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_threads_that_somebody_else_has_placed_stay_there(monkeypatch):
    """NCCL's threads for the network have the mask of the GPU, also where the script binds nothing."""
    first, second, both = {CPUS[0]}, {CPUS[1]}, os.sched_getaffinity(0)
    monkeypatch.setattr(binding, "numa_nodes", lambda: [NumaNode(i, str(*c)) for i, c in enumerate((first, second))])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ready, over = threading.Barrier(3), threading.Event()
    threads = {}

    def run(name, cpus):
        os.sched_setaffinity(0, cpus)
        threads[name] = threading.get_native_id()
        ready.wait()
        over.wait()

    def masks():
        return {name: os.sched_getaffinity(thread) for name, thread in [("main", os.getpid()), *threads.items()]}

    running = [threading.Thread(target=run, args=given) for given in (("near", first), ("far", second))]
    for thread in running:
        thread.start()
    try:
        ready.wait()
        bound = binding.Binding(torch.device("cpu"))
        assert bound.why_not == ""
        bound.turn(True)
        assert masks() == {"main": first, "near": first, "far": second}
        bound.turn(False)
        assert masks() == {"main": both, "near": first, "far": second}
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), both)
        over.set()
        for thread in running:
            thread.join()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-2,5", {0, 1, 2, 5}), ("7", {7}), ("", set()), ("a-b", set()), ("3-", {3}), ("0x4", set())],
)
def test_lists_of_cpus(text, expected):
    assert cpus(NumaNode(0, text)) == expected
