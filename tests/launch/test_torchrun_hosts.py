"""Several hosts, both rendezvous: the same ranks, worker environments and trained parameters as under torchrun."""

import contextlib
import functools

import pytest
import torch
from launchers import REPORTER, SIDES, start, whole

PORT = "29500"  # each host of a lab has all ports to itself
TRAINS = [REPORTER, "--then", "plain.py", "--steps", "20"]
# Which host gets which rank is chance under c10d, and the endpoint's store may choose a port.
OWN_TO_A_LAUNCH = {"LAUNCH_MARK", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "OUT", "PWD"}


def static(lab, host):
    return ["--node-rank", str(host), "--master-addr", lab.address(0), "--master-port", PORT]


def c10d(lab, host):
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{lab.address(0)}:{PORT}", "--rdzv-id", "job"]


JOBS = {"static2": whole(2, static), "c10d2": (2, c10d), "c10d3": whole(3, c10d)}


def run_on_all(lab, command, folder, rendezvous):
    """One agent on each host, all to the same folder; ended, with nothing left on any host."""
    with contextlib.ExitStack() as cleanup:
        agents = []
        for host in range(len(lab)):
            words = ["--nnodes", str(len(lab)), "--nproc-per-node", "1", *rendezvous(lab, host), *TRAINS]
            # Threads that spin for each other would take the cores from the other hosts. (OMP_WAIT_POLICY is read as a
            # library is loaded, so each rank would be a new process.)
            alone = {"OMP_NUM_THREADS": "1"}
            agents.append(start(command, folder, words, alone, popen=functools.partial(lab.fork, host)))
            cleanup.callback(agents[-1].kill)
        codes = [agent.wait().returncode for agent in agents]
    assert codes == [0] * len(lab), agents[0].stderr[-3000:]
    assert [lab.processes(host) for host in range(len(lab))] == [[]] * len(lab)
    return agents[0]


def environments(launch):
    return [
        {name: value for name, value in report["environ"].items() if name not in OWN_TO_A_LAUNCH}
        for report in launch.reports().values()
    ]


@pytest.mark.lab
@pytest.mark.parametrize(("hosts", "rendezvous"), JOBS.values(), ids=JOBS)
def test_same_as_torchrun(lab, tmp_path, hosts, rendezvous):
    net = lab(hosts=hosts)
    torchrun, autoddp = (run_on_all(net, command, tmp_path / side, rendezvous) for side, command in SIDES.items())
    assert [report["RANK"] for report in environments(torchrun)] == [str(rank) for rank in range(hosts)]
    assert environments(autoddp) == environments(torchrun)
    trained = [torch.load(launch.folder / f"rank{r}.pt") for launch in (torchrun, autoddp) for r in range(hosts)]
    assert all(state.keys() == trained[0].keys() for state in trained)
    assert all(torch.equal(state[name], trained[0][name]) for state in trained[1:] for name in trained[0])
