"""A signal ends tuning, or a diagnosis: no job is started, no process is left, and no trial is said to have failed."""

import contextlib
import functools
import json
import signal
import time

import psutil
import pytest
from launchers import AUTODDP, BRIEF, SCRIPTS, start, wait_for, whole, with_limits

from autoddp.processes.signals import ONE_SIGNAL

# Ranks that stay where they are: writing under tuning vanishes, so the file `real` tells of a real job alone.
SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
if os.environ.get("AUTODDP_TUNING") != "1":
    open("real", "w").close()
if sys.argv[1] == "start-up":
    print("waits", flush=True)
    time.sleep(1000)
from common import batches, loss, network, optimizer, start
from torch.nn.parallel import DistributedDataParallel as DDP

rank = start()
model = DDP(network())
sgd = optimizer(model)
for number, (inputs, targets) in enumerate(batches(10**9, rank)):
    time.sleep(0.3 if sys.argv[1] == "baseline" and number > 4 else 0.0)
    sgd.zero_grad()
    loss(model(inputs), targets).backward()
    sgd.step()
"""


def tuning(moment, tmp_path):
    """A launch that has come to the moment."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    signals = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1,SIGNONSENSE"]
    words = ["--nproc-per-node", "2", "--trials", "1000", "--diagnose-budget", "0", *signals, str(script), moment]
    launch = start(BRIEF, tmp_path / "run", words)
    if moment == "start-up":
        logs = ".autoddp/2*/attempt0/*/*/*/stdout.log"
        wait_for(lambda: sum("waits" in p.read_text() for p in launch.folder.glob(logs)) == 2, "the ranks")
    elif moment == "baseline":
        wait_for(lambda: "2 ranks" in launch.stderr, "the first block")
    else:
        wait_for(lambda: "trial " in launch.stderr, "the first trial")
    assert len(launch.processes()) >= 5  # launcher, keeper, agent, two ranks
    return launch


def nothing_else_happened(launch):
    assert not (launch.folder / "real").exists()
    assert not list(launch.folder.glob("*.toml"))
    assert "fail" not in launch.stderr.replace("planted_failure", "")
    assert "Traceback" not in launch.stderr
    assert "launching" not in launch.stderr


# SIGINT is below, and test_keeper.py has SIGUSR1
@pytest.mark.parametrize(
    ("number", "code"), [whole(signal.SIGINT, 130), (signal.SIGTERM, 143), whole(signal.SIGUSR1, 138)]
)
@pytest.mark.parametrize("moment", [whole("start-up"), whole("baseline"), "trial"])
def test_one_signal(moment, number, code, tmp_path):
    launch = tuning(moment, tmp_path)
    if number == signal.SIGUSR1:  # schedulers send it to every process of a job
        (keeper,) = psutil.Process(launch.process.pid).children()
        keeper.send_signal(number)
    launch.process.send_signal(number)
    assert launch.wait().returncode == code
    assert launch.processes() == []
    assert f"autoddp: {number.name}: tuning ends, no job is started\n" in launch.stderr
    assert list(launch.folder.glob(".autoddp/2*/autoddp-*")) == []
    nothing_else_happened(launch)
    if moment == "trial":  # what was measured is kept
        (summary,) = launch.folder.glob(".autoddp/2*/summary.json")
        assert len(json.loads(summary.read_text())["trials"]) >= 1
        assert summary.with_name("report.html").exists()
        assert launch.stderr.endswith(f"{summary.parent}; the next start of the same job goes on with it\n")


@pytest.mark.parametrize("moment", [whole("start-up"), whole("baseline"), "trial"])
def test_a_second_signal_waits_for_nothing(moment, tmp_path):
    """The keeper is stopped, so the first signal cannot come to its end; later it ends everything by itself."""
    launch = tuning(moment, tmp_path)
    (keeper,) = psutil.Process(launch.process.pid).children()
    keeper.suspend()
    launch.process.send_signal(signal.SIGINT)
    wait_for(lambda: "SIGINT: tuning ends" in launch.stderr, "the first signal")
    time.sleep(2 * ONE_SIGNAL)
    launch.process.send_signal(signal.SIGINT)
    assert launch.process.wait(30) == 130
    with contextlib.suppress(psutil.NoSuchProcess):  # the launcher continues it after a while, which is enough for it
        keeper.resume()
    wait_for(lambda: not launch.processes(), "the end of every process")
    nothing_else_happened(launch)


CALLS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
sgd = torch.optim.SGD(torch.nn.Linear(4, 4).parameters())
while True:
    for _ in range(20):
        dist.all_reduce(torch.ones(4))
    sgd.step()
"""


@pytest.mark.parametrize("has_ddp", [False, True])
def test_a_diagnosis_ends_by_ctrl_c_with_the_answer_that_there_is(has_ddp, tmp_path):
    """All that was recorded or measured was thrown away, as if nobody wanted to know it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT if has_ddp else CALLS)
    words = ["diagnose", "--nproc-per-node", "2", str(script), "trial"]
    launch = start(AUTODDP if has_ddp else with_limits({"processes.silence._LONGEST": 2.0}), tmp_path / "run", words)
    if has_ddp:
        journal = functools.partial(launch.folder.glob, ".autoddp/2*/journal.jsonl")
        wait_for(lambda: any(one.read_text().count("\n") > 2 for one in journal()), "the first experiment")
    else:
        wait_for(lambda: "recording what the script communicates, " in launch.stderr, "some calls")
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait().returncode == 130, launch.stderr[-2000:]
    assert launch.processes() == []
    assert "Traceback" not in launch.stderr
    if has_ddp:
        assert "a step of each rank" in launch.stdout
    else:
        assert "the script's own collectives" in launch.stdout
        assert "ended by Ctrl-C" in launch.stdout
