"""The process that watches over attempts: it works however the launcher was started, and it may be killed."""

from __future__ import annotations

import argparse
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from launchers import ROOT, environment
from traces.room import may_bind

from autoddp.attempts import keeper as keeper_module
from autoddp.attempts.keeper import Attempt, Keeper, Shelter
from autoddp.commandline.mode import choose_to_diagnose
from autoddp.commandline.words import parse
from autoddp.isolation import Level
from autoddp.isolation.children import VARIABLE as ISOLATION
from autoddp.isolation.elsewhere import programs
from autoddp.isolation.elsewhere.own import pid_namespace
from autoddp.isolation.kernel import syscalls
from autoddp.isolation.plan import IsolationPlan
from autoddp.processes import silence
from autoddp.processes.polling import polls
from autoddp.processes.signals import NOT_FOR_THE_KEEPER
from autoddp.processes.silence import awaiting
from autoddp.torchrun import jobs
from autoddp.torchrun.options import meeting_words
from autoddp.wire.worker_config import INJECT, KEEPER


@pytest.fixture
def children_are_ignored():
    """As under some schedulers, which start their jobs so."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(("given", "looks"), [("60", 0.1), ("0.05", 0.05)])
def test_elastic_looks_often_at_the_ranks_of_an_attempt(
    given: str, looks: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the job's own ranks are looked at by: each attempt would end 20 seconds late, by SIGKILL."""
    seen: list[float] = []
    monkeypatch.setattr(jobs, "_run_without_restarts", lambda arguments: seen.append(arguments.monitor_interval) or "")
    torchrun = parse(["--nproc-per-node", "2", "--monitor-interval", given, "train.py"]).torchrun
    assert jobs.run_tuning_job(torchrun, tmp_path, 0) == ""
    assert (seen, torchrun.monitor_interval) == ([looks], float(given))
    assert jobs.run_own_job(torchrun, "bench", {}) == ""
    assert seen == [looks, looks]
    words = meeting_words(torchrun, "screening")
    assert words[words.index("--monitor-interval") + 1] == str(looks)


@pytest.mark.parametrize(
    ("codes", "why"),
    [
        ((1, -11), "rank 1 killed by SIGSEGV"),
        ((1, -9), "rank 1 killed by SIGKILL"),
        ((1, -40), "rank 1 killed by signal 40"),
        ((3, -15), "rank 0 ended with exit code 3"),
        ((3, -6), "rank 0 ended with exit code 3"),
    ],
)
def test_a_killed_rank_is_the_cause_of_those_that_fail_with_it(
    codes: tuple[int, int], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elastic ends some by SIGTERM, and gloo some by SIGABRT that fail already."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher import api

    def launch(**_: object) -> object:
        failures = {n: ProcessFailure(n, 1000 + n, code, str(tmp_path / "none")) for n, code in enumerate(codes)}
        raise ChildFailedError("train.py", failures)

    monkeypatch.setattr(api, "elastic_launch", launch)
    assert jobs.run_tuning_job(parse(["--nproc-per-node", "2", "train.py"]).torchrun, tmp_path, 0) == why


def test_what_else_the_job_logs_is_left_out_of_an_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's logs specs took the place of the run's own logs, and events were shown as those of the job."""
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(jobs, "_run_without_restarts", lambda arguments: seen.append(arguments) or "")
    options = parse(["--nproc-per-node", "2", "train.py"])
    filters = {f"duplicate_{name}_filters": ["loss"] for name in ("stdout", "stderr")}  # newer than torch 2.6
    theirs = {"logs_specs": "default", "event_log_handler": "console", **filters}
    vars(options.torchrun).update(theirs)
    assert jobs.run_tuning_job(options.torchrun, tmp_path, 0) == ""
    assert [vars(seen[0])[name] for name in theirs] == [None, "null", [], []]
    assert [vars(options.torchrun)[name] for name in theirs] == list(theirs.values())  # of the job
    says = choose_to_diagnose(options).says
    assert all(f"--{name.replace('_', '-')}" in says for name in theirs)


def test_a_launcher_that_ignores_its_children(children_are_ignored: None) -> None:
    keeper = Keeper()
    try:
        assert keeper.why_no_overlay(Shelter(Level.OFF)) == ""
        assert keeper.why_no_overlay(Shelter(Level.OFF)) == ""
    finally:
        keeper.close()


def test_a_killed_keeper_is_a_reason_and_no_exception(tmp_path: Path) -> None:
    keeper = Keeper()
    os.kill(keeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)
    gone = "the process that watches over the attempt was killed"
    keeper.removes([str(tmp_path)])
    assert keeper.why_no_overlay(Shelter(Level.OFF)) == gone
    attempt = Attempt(argparse.Namespace(), tmp_path, 0, {}, Shelter(Level.OFF))
    assert keeper.run(attempt, lambda _: None, lambda: False) == gone
    keeper.close()


def test_a_system_that_refuses_what_a_keeper_needs_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a sandbox that allows no prctl: without it nobody could end what the script starts, so it is not started."""

    def refused() -> None:
        raise PermissionError(1, "Operation not permitted", "prctl")

    monkeypatch.setattr(syscalls, "adopt_orphans", refused)
    keeper = Keeper()
    attempt = Attempt(argparse.Namespace(), tmp_path, 0, {}, Shelter(Level.OFF))
    why = keeper.run(attempt, lambda _: None, lambda: False)
    keeper.close()
    assert why.startswith("this system refuses prctl (Operation not permitted)")
    assert capfd.readouterr().err == ""


def test_a_late_word_to_stop_names_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the keeper cleans up after an attempt, it is told again and again to stop that attempt."""
    removed = tmp_path / "removed"

    def note(folder: str) -> None:
        with removed.open("a") as file:
            file.write(f"{folder}\n")

    monkeypatch.setattr(keeper_module, "remove_folder", note)  # in the keeper too, which is forked
    keeper = Keeper()
    keeper._connection.send(keeper_module._STOP)
    keeper.removes([str(tmp_path / "scratch")])
    keeper._connection.send(keeper_module._STOP)
    keeper.close()
    assert removed.read_text().splitlines() == [str(tmp_path / "scratch")]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells a process of its parent's end")
def test_a_keeper_that_is_killed_while_an_attempt_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `pkill -9 -f autoddp`. The attempt was left running: its parent's end came before it had asked for it."""
    begins, goes_on = os.pipe(), os.pipe()
    end_with = keeper_module._end_with

    def late(parent: int) -> None:
        os.write(begins[1], b"begins\n")
        os.read(goes_on[0], 1)
        end_with(parent)
        os.write(begins[1], b"is left running\n")

    monkeypatch.setattr(keeper_module, "_end_with", late)
    monkeypatch.setattr(keeper_module, "_close_all_but", lambda *kept: None)
    keeper = Keeper()
    ended: list[str] = []
    runs = threading.Thread(target=lambda: ended.append(keeper.run(an_attempt(tmp_path), print, lambda: False)))
    runs.start()
    with os.fdopen(begins[0]) as told:
        assert told.readline()
        os.kill(keeper.pid, signal.SIGKILL)
        os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)
        os.write(goes_on[1], b"x")
        os.close(begins[1])
        assert told.read() == ""  # until the child has ended, too
    runs.join(60)
    keeper.close()
    assert ended == ["the process that watches over the attempt was killed"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no calls are held")
def test_an_attempt_that_is_killed_while_it_asks_what_the_kernel_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks by a child, which then waited for ever."""
    monkeypatch.setattr(programs.os, "open", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    held, holds = os.pipe()
    attempt = os.fork()
    if attempt == 0:
        try:
            os.setpgid(0, 0)
            programs._memory_can_be_read()
        finally:
            os._exit(0)
    os.close(holds)
    assert os.waitstatus_to_exitcode(os.waitpid(attempt, 0)[1]) == -signal.SIGKILL
    is_left = not select.select([held], [], [], 60)[0]
    if is_left:
        os.killpg(attempt, signal.SIGKILL)
    os.close(held)
    assert not is_left, "its child waits"


def a_rank(tmp_path: Path, keeper: int, in_front: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """One without torch, of an attempt that a keeper of this number has started; it says whether it sees the number."""
    plan = IsolationPlan(Level.OFF, str(tmp_path / "socket")).text()
    path = os.pathsep.join([str(INJECT), str(ROOT)])
    own = {ISOLATION: plan, KEEPER: f"{keeper} {pid_namespace()}", "PYTHONPATH": path}
    words = [*in_front, sys.executable, "-c", f"import os; print({KEEPER!r} in os.environ)"]
    return subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True)


@pytest.mark.skipif(not may_bind(), reason="needs root, for a namespace of process ids")
def test_a_rank_in_a_container_with_process_ids_of_its_own(tmp_path: Path) -> None:
    """It sees no keeper, and must not take it for killed."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh"]
    done = a_rank(tmp_path, os.getpid(), inside)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells a process of its parent's end")
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_rank_that_begins_after_its_keeper_was_killed(is_gone: bool, tmp_path: Path) -> None:
    """It would wait for its process group, for half an hour, with what it holds of a GPU."""
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        uncollected = a_rank(tmp_path, ended.pid) if is_gone else None
    done = a_rank(tmp_path, ended.pid if is_gone else os.getpid())
    assert uncollected is None or uncollected.returncode == -signal.SIGKILL
    assert (done.returncode, done.stdout) == ((-signal.SIGKILL, "") if is_gone else (0, "False\n")), done.stderr


def test_a_keeper_that_does_not_answer_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "_FIRST_WORD", 0.05)
    monkeypatch.setattr(keeper_module, "_ANSWERS", 0.05)
    keeper = Keeper()
    os.kill(keeper.pid, signal.SIGSTOP)
    silent = "the process that watches over the attempt does not answer"
    assert keeper.why_no_overlay(Shelter(Level.OFF)) == silent
    attempt = Attempt(argparse.Namespace(), tmp_path, 0, {}, Shelter(Level.OFF))
    assert keeper.run(attempt, lambda _: None, lambda: False) == silent
    keeper.close()
    assert not os.path.exists(f"/proc/{keeper.pid}")


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    """One that is killed after a minute, so that a test that waits for it fails."""
    one = Keeper()
    killer = threading.Timer(60, os.kill, (one.pid, signal.SIGKILL))
    killer.start()
    try:
        assert one.why_no_overlay(Shelter(Level.OFF)) == ""  # it has begun its work
        yield one
    finally:
        killer.cancel()
        one.close()


def an_attempt(tmp_path: Path) -> Attempt:
    return Attempt(argparse.Namespace(), tmp_path, 0, dict(os.environ), Shelter(Level.OFF))


def result_of_an_attempt(tmp_path: Path) -> str:
    """Why it has ended, as a keeper tells that is started for it."""
    keeper = Keeper()
    try:
        return keeper.run(an_attempt(tmp_path), lambda _: None, lambda: False)
    finally:
        keeper.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere attempts keep the limit")
def test_a_trial_that_aborts_leaves_no_core_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks write as many gigabytes each: into the upper layer, or under the guard beside the script."""
    before = _, most = resource.getrlimit(resource.RLIMIT_CORE)
    if not most:
        pytest.skip("no process may write core files here")
    monkeypatch.setattr(jobs, "run_tuning_job", lambda *_: f"of {resource.getrlimit(resource.RLIMIT_CORE)[0]} bytes")
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    try:
        assert result_of_an_attempt(tmp_path) == "of 0 bytes"
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel is not told whom to end")
def test_an_attempt_is_ended_before_other_programs_where_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes the largest process, which may be a notebook of the user's."""
    own = Path("/proc/self/oom_score_adj")
    before = own.read_text()
    monkeypatch.setattr(jobs, "run_tuning_job", lambda *_: own.read_text().strip())
    assert result_of_an_attempt(tmp_path) == "1000"
    assert own.read_text() == before


def test_an_attempt_shows_no_warnings_of_elastic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under PYTHONWARNINGS=error or PYTHONDEVMODE=1 the user would see one for each log of a rank."""

    def warns(*_: object) -> str:
        warnings.warn("unclosed file", ResourceWarning, stacklevel=1)
        return "nothing was shown"

    monkeypatch.setattr(jobs, "run_tuning_job", warns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert result_of_an_attempt(tmp_path) == "nothing was shown"


def test_a_keeper_that_was_stopped_ends_its_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes to the keeper alone stops it. The launcher would wait for it for ever."""
    monkeypatch.setattr(jobs, "run_tuning_job", lambda *_: time.sleep(1000))  # in the attempt too: it is forked
    keeper = Keeper()
    killer = threading.Timer(60, os.kill, (keeper.pid, signal.SIGKILL))
    killer.start()

    def stops() -> bool:  # it is asked again and again
        os.kill(keeper.pid, signal.SIGSTOP)
        return True

    try:
        ended = "torch elastic, which starts the ranks, was killed by SIGKILL"
        assert keeper.run(an_attempt(tmp_path), lambda _: None, stops) == ended
    finally:
        keeper.close()
        killer.cancel()


@pytest.mark.parametrize("by_itself", [True, False])
def test_what_is_left_of_an_attempt_is_waited_for_and_is_no_part_of_it(
    by_itself: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To remove a hundred thousand files takes a minute. The lines said that the script still ran."""

    def cleans_up(_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)  # nor is a keeper waited for in vain that is stopped now
        time.sleep(0.2)

    monkeypatch.setattr(jobs, "run_tuning_job", lambda *_: "it failed" if by_itself else time.sleep(1000))
    monkeypatch.setattr(keeper_module, "_clean_up_after", cleans_up)
    monkeypatch.setattr(keeper_module, "_ASKS", 0.02)
    keeper = Keeper()
    killer = threading.Timer(60, os.kill, (keeper.pid, signal.SIGKILL))
    killer.start()
    goes_on, waits, asked = keeper._continue, list[object](), list[bool]()

    def continued() -> None:
        waits.append(silence._speaker._waits[-1].what)
        goes_on()

    def stops() -> bool:
        asked.append(bool(waits))
        return not by_itself

    monkeypatch.setattr(keeper, "_continue", continued)
    try:
        with awaiting("the script"):
            ended = keeper.run(an_attempt(tmp_path), lambda _: None, stops)
        assert ended == ("it failed" if by_itself else "torch elastic, which starts the ranks, was killed by SIGKILL")
        assert True not in asked
        assert set(waits) == {"this start of the script to end, and what it has written to be removed"}
    finally:
        keeper.close()
        killer.cancel()


def test_a_keeper_that_was_stopped_is_not_waited_for_in_vain(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keeper_module, "_FIRST_WORD", 0.05)
    os.kill(keeper.pid, signal.SIGSTOP)
    keeper.close()
    said = f"autoddp: waiting for the process that removes what the script has left ({keeper.pid})\n"
    assert capfd.readouterr().err == said
    assert not os.path.exists(f"/proc/{keeper.pid}")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
@pytest.mark.parametrize("starts_programs", [False, True])
def test_a_daemon_of_the_script_that_ends_is_seen_to_have_ended(
    starts_programs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops a daemon waits until its id is gone. An orphan that nobody collects keeps it to the end.

    A script that starts programs all the time gives the keeper something to answer all the time.
    """

    def run_tuning_job(*_: object) -> str:
        reads, writes = os.pipe()
        parent = os.fork()
        if parent == 0:
            daemon = os.fork()
            if daemon:
                os.write(writes, str(daemon).encode())
            os._exit(0)  # the daemon too
        os.waitpid(parent, 0)
        daemon = int(os.read(reads, 20))
        for _ in polls(30.0):
            gone = not os.path.exists(f"/proc/{daemon}")
            if gone:
                break
            if starts_programs:
                subprocess.run(["true"], check=True)
        return "it is gone" if gone else "it is still there"

    monkeypatch.setattr(jobs, "run_tuning_job", run_tuning_job)
    assert result_of_an_attempt(tmp_path) == "it is gone"


def test_signals_for_all_processes_of_a_job_leave_the_keeper_alone(keeper: Keeper) -> None:
    """Schedulers send SIGUSR1 to every process of a job. Who else would clean up?"""
    for number in NOT_FOR_THE_KEEPER:
        os.kill(keeper.pid, number)
    assert keeper.why_no_overlay(Shelter(Level.OFF)) == ""


def test_an_attempt_gets_signals_and_no_terminal_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_tuning_job(*_: object) -> str:
        heeded = {signal.getsignal(number) for number in NOT_FOR_THE_KEEPER}
        return f"{heeded == {signal.SIG_DFL}} {os.getsid(0) == os.getpid()}"

    monkeypatch.setattr(jobs, "run_tuning_job", run_tuning_job)
    # These tests may be started to ignore some, as by nohup.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NOT_FOR_THE_KEEPER}
    try:
        assert result_of_an_attempt(tmp_path) == "True True"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_attempt_ignores_what_its_launcher_was_started_to_ignore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `trap '' USR1` torchrun and its ranks live on when a scheduler sends it to every process of the job."""

    def run_tuning_job(*_: object) -> str:
        os.kill(os.getpid(), signal.SIGUSR1)
        return "it lives on"

    monkeypatch.setattr(jobs, "run_tuning_job", run_tuning_job)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert result_of_an_attempt(tmp_path) == "it lives on"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_the_launcher_handles_leaves_the_keeper_alone() -> None:
    """By `--signals-to-handle SIGTERM,SIGXCPU` the launcher has a handler, which a fork inherits."""
    before = signal.signal(signal.SIGXCPU, lambda *_: sys.exit(152))
    keeper = Keeper()
    try:
        assert keeper.why_no_overlay(Shelter(Level.OFF)) == ""  # it has begun its work
        os.kill(keeper.pid, signal.SIGXCPU)
        assert keeper.why_no_overlay(Shelter(Level.OFF)) == ""
    finally:
        keeper.close()
        signal.signal(signal.SIGXCPU, before)


DEAD = """
import os, signal, sys, threading, time
from pathlib import Path
from autoddp.isolation import Level
from autoddp.isolation.overlay import Layers
from autoddp.attempts import keeper

base, keeper._TRIES, keeper._DIES = sys.argv[1], float(sys.argv[2]), 0.5
def children(pid):
    return [p for p in os.listdir("/proc") if p.isdigit() and parent(p) == str(pid)]
def parent(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""
its = keeper.Keeper()
shelter = keeper.Shelter(Level.OVERLAY, Layers(f"{base}/layers/try", f"{base}/layers/kept"), (), (os.getcwd(),))
"""
ASKS = """
print(its.why_no_overlay(shelter))
(stuck,) = children(its.pid)
print(*sorted({os.readlink(f"/proc/{stuck}/fd/{number}") for number in range(3)}))
its.close()
print("killed in vain" if os.path.exists(f"/proc/{stuck}") else "it ended")
"""
INTERRUPTS = """
def interrupt():
    while not os.path.exists(f"{base}/dead.asked"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=interrupt, daemon=True).start()
try:
    its.why_no_overlay(shelter)
except KeyboardInterrupt:
    its.close()
    print("closed")
"""


@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK) or not may_bind(), reason="needs root and FUSE")
@pytest.mark.parametrize(("program", "tries"), [(ASKS, "5"), (INTERRUPTS, "100000")], ids=["waits", "interrupted"])
def test_a_file_system_that_does_not_answer(program: str, tries: str, tmp_path: Path) -> None:
    """The process that looks at it cannot even be killed, and keeps nobody waiting."""
    dead, work = tmp_path / "dead", tmp_path / "work"
    dead.mkdir()
    work.mkdir()
    words = [str(ROOT / "tests/dead_mount.py"), str(dead), sys.executable, "-c", DEAD + program, str(tmp_path), tries]
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, *words], cwd=work, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said = [f"the file system at {dead} does not answer", "/dev/null", "killed in vain"]
    assert done.stdout.splitlines() == (said if program is ASKS else ["closed"])


SIGNALLED = """
import os, signal
from autoddp.attempts import keeper
from autoddp.isolation import Level
from autoddp.processes.signals import signals_end_tuning

fork = keeper.fork

def signalled():
    child = fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return child

keeper.fork = signalled
with signals_end_tuning():
    one = keeper.Keeper()
    print(repr(one.why_no_overlay(keeper.Shelter(Level.OFF))))
    one.close()
"""
HELD = """
import os, signal, time
from autoddp.processes.children import fork
from autoddp.processes.signals import signals_end_tuning

with signals_end_tuning():
    child = fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
os.kill(child, signal.SIGKILL)
print("''")
"""


@pytest.mark.parametrize("program", [SIGNALLED, HELD])
def test_a_signal_while_the_keeper_is_forked(program: str) -> None:
    """The keeper has the launcher's handlers then, and what a signal wakes; the launcher does not know it yet.

    SIGNALLED: it ignores the signal all the same. HELD: the launcher ends, though nobody has told the keeper to end.
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("''\n", "", 0)
