"""A launcher that is killed, or told to leave, while several hosts tune: all others end soon, and say which it was."""

import functools
import signal
import time

import pytest
from launchers import AUTODDP, BRIEF, ROOT, SCRIPTS, free_port, start, wait_for, whole, with_limits
from test_tuned_hosts import rendezvous

MOMENTS = {
    # what the launcher of host 0 has said by then
    "start": "isolation: ",
    "baseline": "2 ranks on 2 nodes",
    "trial": "trial ",
    "finals": "final rounds: ",
}


def tuning(lab, kind, parent, moment):
    """Launches on all hosts that have come to the moment."""
    env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TUNED_TIMES_LONGER": "1000000"}
    launches = []
    for host in range(len(lab)):
        words = ["--nnodes", str(len(lab)), "--nproc-per-node", "1", *rendezvous(lab, kind, host)]
        words += ["--trials", "3" if moment == "finals" else "1000", "--allow", "exact", "--diagnose-budget", "0"]
        words += [str(SCRIPTS / "plain.py")]
        popen = functools.partial(lab.fork, host)
        launches.append(start(AUTODDP, parent / f"host{host}", words, env, popen=popen))
    wait_for(lambda: MOMENTS[moment] in launches[0].stderr, moment)
    return launches


def ends_for_lack_of(launch, why):
    """With one line that says why, exit code 1, and nothing left."""
    assert launch.wait().returncode == 1, launch.stderr
    (line,) = [line for line in launch.stderr.splitlines() if "autoddp: error: " in line]
    assert why in line
    assert line.endswith("no job is started")
    assert "Traceback" not in launch.stderr
    wait_for(lambda: launch.processes() == [], "the end of every process")
    assert list(launch.folder.glob("*.toml")) == []
    assert list(launch.folder.glob(".autoddp/2*/autoddp-*")) == []


CASES = [
    # rendezvous, the moment, the host that is lost
    whole("c10d", "start", 1),
    whole("c10d", "baseline", 1),
    ("c10d", "trial", 1),
    whole("c10d", "finals", 1),
    whole("c10d", "trial", 0),
    whole("c10d", "finals", 0),
    whole("static", "start", 0),
    whole("static", "trial", 1),
]


@pytest.mark.lab
@pytest.mark.parametrize(("kind", "moment", "lost"), CASES)
def test_a_launcher_that_is_told_to_leave(lab, tmp_path, kind, moment, lost):
    launches = tuning(lab(hosts=2), kind, tmp_path, moment)
    launches[lost].process.send_signal(signal.SIGINT)
    assert launches[lost].wait().returncode == 130
    began = time.monotonic()
    # what follows differs with the meeting: a static job needs that host, an elastic one needs two of any
    ends_for_lack_of(launches[1 - lost], f"(host{lost}) has left: SIGINT; ")
    print(f"ended {time.monotonic() - began:.1f} s after it")
    assert launches[lost].processes() == []


@pytest.mark.lab
@pytest.mark.parametrize(("kind", "moment", "lost"), [whole(*getattr(case, "values", case)) for case in CASES])
def test_a_launcher_that_is_killed(lab, tmp_path, kind, moment, lost):
    hosts = lab(hosts=2)
    launches = tuning(hosts, kind, tmp_path, moment)
    launches[lost].process.kill()
    began = time.monotonic()
    # the one that hosts the store is missed at once
    where = f"the launcher at {hosts.address(0)}:29411, where the hosts meet, is gone"
    ends_for_lack_of(launches[1 - lost], "(host1) has not been heard of for" if lost else where)
    print(f"ended {time.monotonic() - began:.1f} s after it")
    wait_for(lambda: launches[lost].processes() == [], "what the killed launcher has left")


HELD = (
    *BRIEF[:2],
    """\
import os, signal
import autoddp.cli.tuned
def held(*_):
    open(os.path.join(os.environ["OUT"], "held"), "w").close()
    signal.pause()
autoddp.cli.tuned.write_summary = held
"""
    + BRIEF[2],
)
"""The command autoddp, which stands still while it writes what came of tuning."""
WAITS = (*HELD[:2], HELD[2].replace("autoddp.cli.tuned.write_summary", "autoddp.attempts.preparation.await_ports"))
"""The command autoddp, which stands still when tuning is over, as if the script had taken a port."""


@pytest.mark.lab
@pytest.mark.parametrize("last", [HELD, WAITS], ids=["report", "port"])
@pytest.mark.parametrize("kind", ["static", whole("c10d")])
def test_a_launcher_that_is_told_to_leave_when_all_have_decided_what_to_launch(lab, tmp_path, kind, last):
    """The other one started the job, and waited in silence as long as torchrun does."""
    hosts = lab(hosts=2)
    launches = []
    for host, command in enumerate((BRIEF, last)):
        words = ["--nnodes", "2", "--nproc-per-node", "1", *rendezvous(hosts, kind, host), "--trials", "1"]
        words += ["--allow", "exact", "--diagnose-budget", "0", str(SCRIPTS / "plain.py")]
        env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TUNED_TIMES_LONGER": "100"}
        popen = functools.partial(hosts.fork, host)
        launches.append(start(command, tmp_path / f"host{host}", words, env, popen=popen))
    wait_for(lambda: (tmp_path / "host1/held").exists() and "recipe written" in launches[0].stderr, "the decision")
    launches[1].process.send_signal(signal.SIGINT)
    assert launches[1].wait().returncode == 130
    assert launches[0].wait().returncode == 1
    said = launches[0].stderr.splitlines()
    assert said[-1].endswith("(host1) has left: SIGINT; the job needs 2 hosts, and no job is started")
    assert [launch.processes() for launch in launches] == [[], []]


HASTY = with_limits({"processes.silence._LONGEST": 1.0})
KILLED = (*HASTY[:2], "import os, autoddp.cli.main\nautoddp.cli.main.launch = lambda job: os._exit(9)\n" + HASTY[2])
"""The command autoddp, which ends when it is about to launch the job."""


def test_a_launcher_that_is_killed_when_all_launch_the_job_is_not_waited_for_in_silence(tmp_path):
    """Torchrun says nothing for a quarter of an hour."""
    recipe, port, launches = ROOT / "tests" / "recipe" / "sound.autoddp.toml", free_port(), []
    for host, command in enumerate((HASTY, KILLED)):
        words = ["--nnodes", "2", "--node-rank", str(host), "--master-addr", "127.0.0.1", "--master-port", port]
        words += ["--recipe", str(recipe), "--force", "--no-python", "true"]
        launches.append(start(command, tmp_path / f"host{host}", words))
    try:
        assert launches[1].wait().returncode == 9, launches[1].stderr
        said = "autoddp: waiting for the other hosts to start the job, "
        wait_for(lambda: said in launches[0].stderr, "the line about the other hosts")
    finally:
        launches[0].kill()


def test_a_host_that_never_comes_is_not_waited_for_in_silence_without_a_meeting(tmp_path):
    """`--trials 0` does what torchrun does, whose agent says nothing for a quarter of an hour."""
    words = ["--nnodes", "2", "--master-port", free_port(), "--trials", "0", "--no-python", "true"]
    launch = start(HASTY, tmp_path, words)
    try:
        wait_for(lambda: "autoddp: waiting for the other hosts to start the job, " in launch.stderr, "the line")
    finally:
        launch.kill()
