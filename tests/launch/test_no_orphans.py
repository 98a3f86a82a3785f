"""--no-orphans: nothing of the job outlives its launcher, nothing else is ended, and all else is as without it."""

import contextlib
import functools
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from launchers import AUTODDP, REPORTER, SCRIPTS, SIDES, start, wait_for, whole

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")

# A launcher without torch, below a real supervisor. It leaves in OUT what it gets and what it has started.
LAUNCHER = """
import os, signal, subprocess, sys, time
from autoddp.processes.supervisor import run_below_a_supervisor

how = sys.argv[1]
open("command", "w").write(str(os.getpid()))
run_below_a_supervisor()
open("launcher", "w").write(str(os.getpid()))
open("supervisor", "w").write(str(os.getppid()))
if how == "exit":
    print(sys.stdin.read(), end="", flush=True)
    sys.exit(int(sys.argv[2]))
if how == "die":
    os.kill(os.getpid(), int(sys.argv[2]))
if how == "signals":
    def handle(number, _):
        with open("signals", "a") as file:
            file.write(f"{number}\\n")
        if number == signal.SIGTERM:
            sys.exit(3)
    for number in map(int, sys.argv[2:]):
        signal.signal(number, handle)
else:
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    deaf = [sys.executable, "-c", "import signal, time; signal.signal(15, 1); print(flush=True); time.sleep(1000)"]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    several = ["sh", "-c", "sleep 1000 & setsid sleep 1000 & echo; exec sleep 1000"]
    stopped = subprocess.Popen(several, stdout=subprocess.PIPE)
    stopped.stdout.readline()
    stopped.send_signal(signal.SIGSTOP)
    if how == "start deaf":
        subprocess.Popen(deaf, stdout=subprocess.PIPE).stdout.readline()
    if os.fork() == 0:  # a daemon, as daemons make themselves
        os.setsid()
        if os.fork() == 0:
            os.execv(sleep[0], sleep)
        os._exit(0)
    os.wait()
open("ready", "w").close()
if how == "leave":
    sys.exit(5)
while True:
    time.sleep(60)
"""


def run(tmp_path, *words, popen=subprocess.Popen):
    """Start the launcher; `Launch.process` is the command."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    return start(
        [sys.executable, str(tmp_path / "launcher.py")], tmp_path / "out", [str(w) for w in words], popen=popen
    )


def ready(launch):
    wait_for(lambda: (launch.folder / "ready").exists(), "the launcher")
    return {name: int((launch.folder / name).read_text()) for name in ("command", "supervisor", "launcher")}


def signals(launch):
    with contextlib.suppress(FileNotFoundError):
        return [int(line) for line in (launch.folder / "signals").read_text().split()]
    return []


@pytest.fixture
def cleanup():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("code", [0, 1, 255])
def test_the_command_ends_with_the_launchers_exit_code(tmp_path, code):
    (tmp_path / "input").write_text("from standard input")
    with open(tmp_path / "input") as file:
        launch = run(tmp_path, "exit", code, popen=lambda *a, **kw: subprocess.Popen(*a, stdin=file, **kw)).wait()
    assert (launch.returncode, launch.stdout, launch.stderr) == (code, "from standard input", "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGUSR1, signal.SIGINT])
def test_the_command_ends_by_the_launchers_signal(tmp_path, number):
    assert run(tmp_path, "die", int(number)).wait().returncode == -number


def test_each_signal_reaches_the_launcher_once(tmp_path, cleanup):
    """By process id and for the process group, also one that is ignored when the command starts, as under nohup."""
    numbers = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    cleanup.callback(signal.signal, signal.SIGHUP, before)
    popen = functools.partial(subprocess.Popen, start_new_session=True)
    launch = run(tmp_path, "signals", *map(int, numbers), 15, popen=popen)
    cleanup.callback(launch.kill)
    ready(launch)
    expected = []
    for send in (os.kill, os.killpg):
        for number in numbers:
            send(launch.process.pid, number)
            expected.append(int(number))
            wait_for(lambda: len(signals(launch)) >= len(expected), f"{number}")
    os.killpg(launch.process.pid, signal.SIGTERM)
    assert launch.wait().returncode == 3
    assert signals(launch) == [*expected, 15]


def test_keys_and_hang_up_of_a_terminal_reach_the_launcher_once(tmp_path, cleanup):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "launcher.py", "signals", "1", "2", "3", "15"])
    cleanup.callback(lambda: os.path.exists(f"/proc/{pid}") and os.kill(pid, signal.SIGKILL))
    wait_for((tmp_path / "ready").exists, "the launcher")
    got = tmp_path / "signals"
    for keys, count in ((b"\x03", 1), (b"\x1c", 2)):  # Ctrl-C and Ctrl-\
        os.write(terminal, keys)
        wait_for(lambda count=count: got.exists() and len(got.read_text().split()) >= count, "the signal")
    os.close(terminal)
    wait_for(lambda: len(got.read_text().split()) >= 3, "the signal of the hang-up")
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert got.read_text().split() == ["2", "3", "1", "15"]


def test_a_killed_command_leaves_nothing_and_ends_nothing_else(tmp_path, cleanup):
    """Seven processes in all kinds of sessions; one that the user has started before lives on."""
    earlier = tmp_path / "earlier"
    shell = ["sh", "-c", f'sleep 1000 & echo $! > {earlier}; exec "$@"', "-"]
    launch = run(tmp_path, "start deaf", popen=lambda words, **kw: subprocess.Popen([*shell, *words], **kw))
    cleanup.callback(launch.kill)
    ready(launch)
    mine = int(earlier.read_text())
    # The three, seven that the launcher has started, and the earlier one. Within execve a process shows no mark.
    wait_for(lambda: len(launch.processes()) >= 11, "all of them")
    launch.process.kill()
    wait_for(lambda: launch.processes() == [mine], "the end of every process")
    assert launch.wait().returncode == -signal.SIGKILL
    assert "the launcher, which was killed, has left behind" in launch.stderr
    assert psutil.Process(mine).is_running()


def test_a_killed_launcher_leaves_nothing(tmp_path, cleanup):
    launch = run(tmp_path, "start")
    cleanup.callback(launch.kill)
    os.kill(ready(launch)["launcher"], signal.SIGKILL)
    assert launch.wait().returncode == -signal.SIGKILL
    assert launch.processes() == []


def test_a_job_that_ends_leaves_nothing_and_its_exit_code_stays(tmp_path, cleanup):
    launch = run(tmp_path, "leave")
    cleanup.callback(launch.kill)
    assert launch.wait().returncode == 5
    assert launch.processes() == []
    assert "--no-orphans: ending what the job has left behind: " in launch.stderr
    assert "sleep (" in launch.stderr


def test_a_killed_supervisor_has_the_launcher_end_its_ranks(tmp_path, cleanup):
    launch = run(tmp_path, "signals", 15)
    cleanup.callback(launch.kill)
    os.kill(ready(launch)["supervisor"], signal.SIGKILL)
    assert launch.wait().returncode == -signal.SIGKILL
    assert "the process that watches over the job was killed" in launch.stderr
    wait_for(lambda: launch.processes() == [], "the end of the launcher")
    assert signals(launch) == [15]


# Real jobs

JOB = """
import os, subprocess, sys, time
import torch
from torch.utils.data import DataLoader

sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
loader = DataLoader(range(10**6), num_workers=2, persistent_workers=True)
for number, _ in enumerate(loader):
    if number == 3:
        open(f"{os.environ['OUT']}/up{os.environ['RANK']}", "w").close()
    time.sleep(0.1)
"""


@pytest.mark.parametrize("option", [("--no-orphans",), whole(())])
def test_a_real_job_whose_launcher_is_killed(tmp_path, cleanup, option):
    """Without the option its ranks go on without their launcher, as under torchrun."""
    (tmp_path / "job.py").write_text(JOB)
    words = ["--trials", "0", *option, "--nproc-per-node", "2", str(tmp_path / "job.py")]
    launch = start(AUTODDP, tmp_path / "out", words, popen=subprocess.Popen)
    cleanup.callback(launch.kill)
    wait_for(lambda: len(list(launch.folder.glob("up*"))) == 2, "the loaders")
    ranks = [
        p for p in launch.processes() if psutil.Process(p).ppid() != launch.process.pid and p != launch.process.pid
    ]
    assert len(ranks) >= 6
    launch.process.kill()
    launch.wait()
    if option:
        wait_for(lambda: launch.processes() == [], "the end of every process")
    else:
        time.sleep(3)
        assert launch.processes() != []


TUNED = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
import torch
from common import batches, loss, network, optimizer, start
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

if __name__ == "__main__":
    real = "AUTODDP_TUNING" not in os.environ
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    rank = start()
    model = DDP(network())
    sgd = optimizer(model)
    loader = iter(DataLoader(range(10**9), num_workers=1))
    for number, (inputs, targets) in enumerate(batches(10**9 if real else 4000, rank)):
        if number % 100 == 0:
            next(loader)
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
        if real and number == 3:
            print("the job trains", file=sys.stderr, flush=True)
        if not real:
            time.sleep(0.002)
"""
MOMENTS = {
    # what the launcher, or in the job a rank, has said by then
    "start": "isolation: ",
    "baseline": "ranks on 1 node",
    "trial": "trial 1/",
    "finals": "final rounds: ",
    "hand-over": "recipe written",
    "job": "the job trains",
}


@pytest.mark.parametrize(
    ("moment", "option"),
    [
        *(whole(moment, ["--no-orphans"]) for moment in MOMENTS),
        *(whole(moment, []) for moment in MOMENTS if moment not in ("hand-over", "job")),  # those ranks are torchrun's
    ],
)
def test_a_tuned_job_whose_launcher_is_killed(tmp_path, cleanup, moment, option):
    """No process, mount, port or shared memory is left, and no file but those of the script's own libraries."""
    (tmp_path / "train.py").write_text(TUNED)
    temporary = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="t", dir="/tmp")))
    shared = set(os.listdir("/dev/shm"))
    words = [*option, "--nproc-per-node", "2", "--trials", "3", "--allow", "exact", str(tmp_path / "train.py")]
    launch = start(AUTODDP, tmp_path / "out", words, {"TMPDIR": str(temporary)}, subprocess.Popen)
    cleanup.callback(launch.kill)
    wait_for(lambda: MOMENTS[moment] in launch.stderr, moment)
    pids = launch.processes()
    ports = listening(pids)
    launch.process.kill()
    launch.process.wait(30)
    wait_for(lambda: launch.processes() == [], "the end of every process")
    assert [path.name for path in temporary.iterdir() if not path.name.startswith(("torch", "pymp"))] == []
    assert list(launch.folder.glob(".autoddp/2*/autoddp-*")) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert str(temporary) not in Path("/proc/self/mountinfo").read_text()
    # The kernel closes a process's sockets after its memory, by which `processes` knows it.
    wait_for(lambda: not (listening() & ports), "the ports")
    assert {name for name in set(os.listdir("/dev/shm")) - shared if _is_of(name, pids)} == set()


def listening(pids=(None,)):
    """Ports on which these processes listen, or of which no process is known."""
    return {c.laddr.port for c in psutil.net_connections() if c.status == "LISTEN" and c.pid in pids}


def _is_of(name, pids):
    """Whether a name in /dev/shm has one of these process ids in it: others make theirs at the same time."""
    return any(str(pid) in re.split(r"\D+", name) for pid in pids)


# name: torchrun's words, the script's words, a signal
ENDINGS = {
    "ends": ([], [], None),
    "a rank fails": ([], ["--exit", "7"], None),
    "a rank is killed": ([], ["--kill"], None),
    "restarted": (["--max-restarts", "2"], ["--restarts", "1"], None),
    "tee": (["--tee", "3", "--redirects", "3", "--log-dir", "{out}/logs"], [], None),
    "SIGINT": ([], ["--wait"], signal.SIGINT),
    "SIGTERM": ([], ["--wait"], signal.SIGTERM),
    "SIGHUP": ([], ["--wait"], signal.SIGHUP),
    "SIGUSR1": (["--signals-to-handle", "SIGTERM,SIGUSR1"], ["--wait"], signal.SIGUSR1),
}


@pytest.mark.parametrize("name", [whole(name) for name in ENDINGS])
def test_a_real_job_ends_as_under_torchrun(tmp_path, cleanup, name):
    """Exit code, output, what the ranks are told, and the last line of the summary."""
    options, words, number = ENDINGS[name]
    sides = {"torchrun": SIDES["torchrun"], "autoddp": (*SIDES["autoddp"], "--no-orphans")}
    both = {}
    for side, command in sides.items():
        job = [*options, "--nproc-per-node", "2", REPORTER, *words]
        both[side] = start(command, tmp_path / side, job, popen=subprocess.Popen)
        cleanup.callback(both[side].kill)
    for side, launch in both.items():
        if number is not None:
            wait_for(lambda launch=launch: len(launch.reports()) == 2, f"the workers of {side}")
            launch.process.send_signal(number)
        launch.wait()
    assert both["autoddp"].returncode == both["torchrun"].returncode
    assert (both["torchrun"].returncode != 0) == (name not in ("ends", "restarted", "tee"))
    told = {side: {p.name: p.read_text() for p in launch.folder.glob("signal*")} for side, launch in both.items()}
    assert told["autoddp"] == told["torchrun"]
    assert sorted(both["autoddp"].reports()) == sorted(both["torchrun"].reports())
    lines = {side: sorted(launch.anonymous(launch.stdout).splitlines()) for side, launch in both.items()}
    assert lines["autoddp"] == lines["torchrun"]
    said = {side: launch.anonymous(launch.stderr).strip().splitlines() for side, launch in both.items()}
    ranks = {side: sorted(line for line in lines if "on stderr" in line) for side, lines in said.items()}
    assert ranks["autoddp"] == ranks["torchrun"]
    if both["torchrun"].returncode:
        assert said["autoddp"][-1] == said["torchrun"][-1]
    assert both["autoddp"].processes() == []


SLOW = """
import os, signal, time

def handle(number, _):
    open(f"{os.environ['OUT']}/signal{os.environ['RANK']}", "a").write(f"{number} ")
    time.sleep(6)
    os._exit(0)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, handle)
open(f"{os.environ['OUT']}/up{os.environ['RANK']}", "w").close()
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [whole(signal.SIGINT), whole(signal.SIGTERM)])
def test_a_second_signal_does_what_it_does_under_torchrun(tmp_path, cleanup, number):
    (tmp_path / "job.py").write_text(SLOW)
    sides = {"torchrun": SIDES["torchrun"], "autoddp": (*SIDES["autoddp"], "--no-orphans")}
    ended = {}
    for side, command in sides.items():
        job = ["--nproc-per-node", "2", str(tmp_path / "job.py")]
        launch = start(command, tmp_path / side, job, popen=subprocess.Popen)
        cleanup.callback(launch.kill)
        for name in ("up", "signal"):
            wait_for(lambda launch=launch, name=name: len(list(launch.folder.glob(f"{name}*"))) == 2, name)
            launch.process.send_signal(number)
        launch.wait()
        told = sorted(path.read_text() for path in launch.folder.glob("signal*"))
        ended[side] = (launch.returncode, launch.anonymous(launch.stderr).strip().splitlines()[-1], told)
    assert ended["autoddp"] == ended["torchrun"]
    assert launch.processes() == []
