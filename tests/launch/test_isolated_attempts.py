"""Tuning attempts are isolated: what the script owns stays, each attempt begins from it, nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launchers import AUTODDP, BRIEF, ROOT, SCRIPTS, Launch, forked, free_port, start, wait_for, whole
from test_tuned_scripts import run, summary
from traces.room import ORDINARY, Room, _readable_interpreter, may_bind

from autoddp.attempts import isolating, preparation, tune
from autoddp.attempts.isolating import Isolation, _overlay, _starts_python, choose_isolation
from autoddp.attempts.limits import Written
from autoddp.attempts.starts import objective
from autoddp.attempts.tune import Tuning
from autoddp.cli import wrap
from autoddp.cli.diagnose import examine
from autoddp.cli.main import prepare
from autoddp.commandline.words import parse
from autoddp.errors import UsageError
from autoddp.hosts.together import Hosts
from autoddp.isolation import Level
from autoddp.isolation.ports import noted_ports, ports_kept
from autoddp.runs.folder import RunFolder

LONG = {"TUNED_TIMES_LONGER": "40"}
STATEFUL = str(SCRIPTS / "stateful.py")


def rank0_says(launch: Launch) -> str:
    """What rank 0 printed in all attempts."""
    return "".join(path.read_text() for path in sorted(launch.folder.glob(".autoddp/2*/attempt*/*/*/0/stdout.log")))


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder for one launch alone, with a short name: a socket's path may not be long."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


def folder_with_state(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "state.txt").write_text("the user's\n")
    return folder


@pytest.mark.parametrize("kind", ["file", whole("pipe"), whole("terminal")])
def test_every_attempt_begins_from_the_users_state(kind: str, tmp_path: Path, temporary: Path) -> None:
    """Trials that fail cost an attempt each. The data is prepared once; standard input is whole in the real job."""
    folder = folder_with_state(tmp_path)
    (tmp_path / "input").write_text("x" * 1000)
    with open(tmp_path / "input") as file, contextlib.ExitStack() as stack:
        stdin: Any = file
        if kind == "pipe":
            cat = stack.enter_context(subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE))
            assert cat.stdout is not None
            stdin = cat.stdout
        if kind == "terminal":
            ends = pty.openpty()
            stack.callback(os.closerange, min(ends), max(ends) + 1)
            stdin, as_it_was = ends[1], termios.tcgetattr(ends[1])
        words = ["--nproc-per-node", "2", "--trials", "2", "--allow", "exact", "--diagnose-budget", "0", STATEFUL]
        popen = forked if kind == "file" else subprocess.Popen
        env = {**LONG, "TMPDIR": str(temporary)}
        launch = start(BRIEF, folder, words, env, popen=partial(popen, stdin=stdin)).wait()
        assert kind != "terminal" or termios.tcgetattr(stdin) == as_it_was
    assert (tmp_path / "input").read_text() == "x" * 1000
    assert launch.returncode == 0, launch.stderr[-2000:]
    attempts = list(folder.glob(".autoddp/2*/attempt*"))
    assert len(attempts) > 1
    said = rank0_says(launch)
    assert said.count("state: the user's") == len(attempts)
    assert "state: changed" not in said
    assert said.count("preparing the data") == 1
    # an attempt's standard input is empty where the user's cannot be read twice; a terminal's is another terminal
    found = {"file": "input: 1000", "pipe": "input: 0", "terminal": "terminal: as it was"}[kind]
    assert said.count(found) == len(attempts)
    failed = [trial for trial in summary(launch)["trials"] if trial["state"] == "failed"]
    assert failed
    assert all("planted: cannot train" in trial["reason"] for trial in failed)
    # the real job, which prints where the user sees it
    assert launch.stdout.count("state: the user's") == 1
    assert launch.stdout.count("terminal: as it was" if kind == "terminal" else "input: 1000") == 1
    assert launch.stdout.count("preparing the data") == 1
    assert (folder / "state.txt").read_text() == "changed\n"
    assert launch.processes() == []
    # torch's own, of the real job
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torch")] == []


@pytest.mark.parametrize("has_input", [True, False])
def test_a_script_that_read_nothing_from_a_pipe_is_told_why(has_input: bool, tmp_path: Path) -> None:
    """All that was told was the error of the script, which nobody has seen without autoddp."""
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nassert os.environ['RANK'] != '0' or sys.stdin.read(), 'no learning rate'\n")
    reads, writes = os.pipe()
    os.write(writes, b"0.1" * has_input)
    os.close(writes)
    with open(reads) as stdin:
        words = ["--nproc-per-node", "2", "--trials", "2", str(script)]
        launch = start(BRIEF, tmp_path / "run", words, popen=partial(subprocess.Popen, stdin=stdin)).wait()
    assert launch.returncode == (0 if has_input else 1)
    assert "launching as written: " in launch.stderr
    assert ("standard input is a pipe, kept for the job: " in launch.stderr) is has_input


@pytest.mark.parametrize(
    ("environment", "options", "why"),
    [
        whole(
            {"WRITES": "1"},
            ["--scratch-limit", "20M"],
            "during tuning, more than --scratch-limit (20.0 MiB)",
        ),
        whole({"CHANGES": "big"}, ["--scratch-limit", "20M"], "open of big would put all of it (30.0 MiB) into"),
        whole({"CHANGES": "link"}, ["--scratch-limit", "20M"], "open of link would put all of it (30.0 MiB) into"),
        ({"REMOVES_ELSEWHERE": "1"}, [], "aws"),
    ],
    ids=["writes too much", "changes a large file", "changes it by a link", "removes elsewhere"],
)
def test_what_ends_tuning(environment: dict[str, str], options: list[str], why: str, tmp_path: Path) -> None:
    folder = folder_with_state(tmp_path)
    (folder / "big").write_bytes(b"0" * (30 << 20))
    (folder / "link").symlink_to("big")
    # the real job must not do what ended the tuning: the test has no bucket, and needs no large file
    script = tmp_path / "script.py"
    script.write_text(
        "import os, runpy, sys\n"
        "if 'AUTODDP_TUNING' not in os.environ:\n"
        "    for name in ('WRITES', 'CHANGES', 'REMOVES_ELSEWHERE'): os.environ.pop(name, None)\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        f"runpy.run_path({STATEFUL!r}, run_name='__main__')\n"
    )
    aws = tmp_path / "bin" / "aws"
    aws.parent.mkdir()
    aws.write_text(f"#!/bin/sh\necho $* >{folder}/large-removal\n")
    aws.chmod(0o755)
    words = [*options, "--trials", "8"]
    path = f"{aws.parent}{os.pathsep}{os.environ['PATH']}"
    launch = run(AUTODDP, folder, str(script), *words, env={"TUNED_TIMES_LONGER": "1000", "PATH": path, **environment})
    assert launch.returncode == 0, launch.stderr[-2000:]
    (line,) = [line for line in launch.stderr.splitlines() if "not tuned, launching as written" in line]
    assert why in line
    assert "Traceback" not in launch.stderr
    assert launch.stdout.count("state: the user's") == 1  # the real job, from the user's state
    assert (folder / "big").read_bytes() == b"0" * (30 << 20)
    assert list(folder.glob("large*")) == []


REPORTS = """
import os, runpy, subprocess
if os.environ["RANK"] == "0":
    where = f"sockaddr_in({os.environ['REPORTS_TO']}, INADDR_LOOPBACK)"
    program = f'socket(S, PF_INET, SOCK_STREAM, 0) and connect(S, {where}) and syswrite(S, "began") or die $!'
    subprocess.run(["perl", "-MSocket", "-e", program], check=True)
runpy.run_path(os.environ["THEN"], run_name="__main__")
"""


@pytest.mark.skipif(shutil.which("perl") is None, reason="needs a program that is not Python, such as perl")
@pytest.mark.parametrize("level", ["overlay", whole("guard"), whole("off")])
def test_a_program_that_nobody_knows_reaches_its_server_once(level: str, tmp_path: Path) -> None:
    """Only in the real job: no list has all programs that send something, so the kernel holds what they connect to."""
    folder = folder_with_state(tmp_path)
    (tmp_path / "reports.py").write_text(REPORTS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        environment = {"REPORTS_TO": str(port), "THEN": STATEFUL, "PYTHONPATH": str(SCRIPTS)}
        options = ["--isolation", level, "--trials", "2"]
        launch = run(AUTODDP, folder, str(tmp_path / "reports.py"), *options, env=environment)
        assert launch.returncode == 0, launch.stderr[-2000:]
        server.settimeout(0)
        with server.accept()[0] as once:
            assert once.recv(100) == b"began"
        with pytest.raises(BlockingIOError):
            server.accept()
    (line,) = [line for line in launch.stderr.splitlines() if "not tuned, launching as written" in line]
    why = "perl -MSocket" if level == "guard" else f"perl connects to 127.0.0.1:{port}, and autoddp does not know what"
    assert why in line


@pytest.mark.whole
def test_a_program_that_waits_at_a_pipe_of_others_ends_tuning(tmp_path: Path) -> None:
    """Under the overlay the pipe has no other end; no word of the command names it."""
    folder = folder_with_state(tmp_path)
    os.mkfifo(folder / "pipe")
    (folder / "tells.sh").write_text("[ -z $AUTODDP_TUNING ] || echo began >$PWD/pipe\n")
    (tmp_path / "reports.py").write_text(
        "import runpy, subprocess\n"
        "subprocess.run(['sh', 'tells.sh'])\n"
        f"runpy.run_path({STATEFUL!r}, run_name='__main__')\n"
    )
    words = ["--isolation", "overlay", "--trials", "2"]
    launch = run(AUTODDP, folder, str(tmp_path / "reports.py"), *words, env={"PYTHONPATH": str(SCRIPTS)})
    assert launch.returncode == 0, launch.stderr[-2000:]
    (line,) = [line for line in launch.stderr.splitlines() if "not tuned, launching as written" in line]
    assert f"sh tells.sh opens {folder}/pipe, a named pipe that is older than this run" in line


@pytest.mark.parametrize(
    ("level", "why"),
    [
        whole("overlay", "git changes something outside this run (git push)"),
        ("off", "git changes something outside this run (git push)"),
        ("guard", "./run.sh is no Python, and without an overlay nothing takes back what it writes"),
    ],
)
def test_a_program_is_judged_before_it_is_started(level: str, why: str, tmp_path: Path) -> None:
    """Under --no-python no check runs in the shell."""
    folder = folder_with_state(tmp_path)
    script = folder / "run.sh"
    script.write_text('#!/bin/sh\ngit push\necho "${AUTODDP_TUNING:-launched}" >>starts\n')
    script.chmod(0o755)
    words = ["--nproc-per-node", "2", "--isolation", level, "--no-python", "./run.sh"]
    launch = start(AUTODDP, folder, words, {}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert f"not tuned, launching as written: {why}" in launch.stderr
    assert (folder / "starts").read_text() == "launched\n" * 2


@pytest.mark.parametrize("aim", [["--objective", "regex:max:rate (.)", "--tune-only"], whole([])], ids=["one", "two"])
def test_ranks_that_elastic_spawns_begin_under_guard(aim: list[str], tmp_path: Path) -> None:
    """Elastic makes a file for each of them in the temporary folder, which is not the launcher's there."""
    script = tmp_path / "train.py"
    script.write_text("print('rate 3')\n")
    # Each start of a rank is one of Python and torch. With an objective one is enough, with the threads set it is all.
    words = ["--nproc-per-node", "1" if aim else "2", *aim, "--isolation", "guard", "--run-path", str(script)]
    launch = start(AUTODDP, tmp_path / "run", words, {"OMP_NUM_THREADS": "1"}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    if aim:
        assert summary(launch)["objective"]["as_written"] == 3
    else:
        assert "not tuned, launching as written: the script built no DistributedDataParallel model" in launch.stderr
    assert launch.stdout == ("" if aim else "rate 3\n" * 2)


@pytest.mark.whole
@pytest.mark.parametrize("level", ["overlay", "guard"])
def test_a_script_that_closes_all_its_files_is_tuned(level: str, tmp_path: Path) -> None:
    """As daemons do. It then counts as a program that nobody knows, and connects to the launcher all the same."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, runpy, sys; os.closerange(3, 1024); sys.path[0] = {str(SCRIPTS)!r}; "
        f"runpy.run_path({str(SCRIPTS / 'plain.py')!r}, None, '__main__')"
    )
    launch = run(BRIEF, tmp_path / "run", str(script), "--isolation", level, env=LONG)
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert "not tuned" not in launch.stderr
    assert summary(launch)["trials"]


def test_programs_that_only_start_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under guard each Python checks itself. numactl is the usual reason for --no-python."""
    for name, first in (("entry", f"#!{sys.executable}"), ("shell", "#!/bin/sh")):
        (tmp_path / name).write_text(f"{first}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for words in ([sys.executable, "t.py"], ["entry"], ["env", "A=1", sys.executable], ["taskset", "-c", "0", "entry"]):
        assert _starts_python(words), words
    for words in (["shell"], ["env", "shell", sys.executable], ["sh", "entry"], ["no-such-program"], ["env", "A=1"]):
        assert not _starts_python(words), words


@pytest.mark.whole
@pytest.mark.parametrize("level", ["overlay", "guard"])
def test_a_named_pipe_is_written_by_the_real_job_alone(level: str, tmp_path: Path) -> None:
    """Its reader would take the end of an attempt for the end of the job, which would then wait for a reader."""
    folder = folder_with_state(tmp_path)
    os.mkfifo(folder / "m")
    script = tmp_path / "script.py"
    script.write_text(
        f"import runpy, sys; sys.path[0] = {str(SCRIPTS)!r}; runpy.run_path({STATEFUL!r}, None, '__main__')"
    )
    with open(tmp_path / "metrics.log", "wb") as log, subprocess.Popen(["cat", folder / "m"], stdout=log) as reader:
        launch = run(AUTODDP, folder, str(script), "--isolation", level, env={**LONG, "PIPE": "m"})
        reader.wait(60)
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert "not tuned, launching as written: open of " in launch.stderr
    assert "m, a named pipe that is older than this run" in launch.stderr
    assert (tmp_path / "metrics.log").read_text() == "".join(f"step {number}\n" for number in range(60))


def test_what_is_written_under_guard_has_a_limit_and_does_not_add_up(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most containers have guard alone, and its scratch folders lie on the disk of the current folder.

    Under --objective there are a dozen attempts or more, and each may save what the job saves.
    """
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    options = parse(["--isolation", "guard", "--scratch-limit", "20M", "train.py"])
    folder = RunFolder(tmp_path / "out")
    keeper: Any = None  # guard needs none to be chosen
    isolation = choose_isolation(options, folder, keeper)
    tuning: Any = object.__new__(Tuning)
    tuning._folder, tuning._isolation, tuning.hosts = folder, isolation, Hosts()
    tuning.reporter = SimpleNamespace(say=print)
    for number in range(3):
        written = tuning._where_writes_go(number, folder.attempt(number))
        (written / "model.pt").write_bytes(b"0" * (12 << 20))
        assert Written(isolation, "tuning").too_much() == ""
    assert [path.parent.parent.name for path in folder.path.glob("attempt*/written/model.pt")] == ["attempt2"]
    (written / "more.pt").write_bytes(b"0" * (12 << 20))
    why = Written(isolation, "tuning").too_much()
    assert why.startswith("the script has written ")
    assert why.endswith(" during tuning, more than --scratch-limit (20.0 MiB)")
    folder.clean()


def test_a_disk_without_locks_is_named_before_the_script_is_started_under_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre is mounted without them at many sites, and no overlay lies over it: each write would fail there."""

    def flock(_file: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    folder = RunFolder(tmp_path / "out")
    torchrun = parse(["train.py"]).torchrun
    why = f"the file system of {folder.path} has no locks, which guard needs; name another one by --output"
    assert Isolation(Level.GUARD, folder).why_not_started(torchrun) == why
    assert Isolation(Level.OVERLAY, folder).why_not_started(torchrun) == ""
    folder.clean()


RUNS = {
    # torchrun's words, the program in PYTHON_EXEC, why the script is not started to be tuned
    "forked": (
        "--run-path --start-method fork",
        "",
        "autoddp gets into no copy, so nothing there keeps what it writes",
    ),
    "spawned": ("--run-path", "", ""),
    "forked, without --run-path": ("--start-method fork", "", ""),  # torch starts a program then, whatever is said
    "this Python": ("", sys.executable, ""),
    "a shell script": ("", "./py", ""),
    "a shell script that --run-path leaves alone": ("--run-path", "./py", ""),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_rank_that_would_begin_without_the_checks_is_not_started(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a rank writes real files under guard, and sends what it likes at every level."""
    words, program, why = RUNS[name]
    monkeypatch.chdir(tmp_path)
    Path("py").write_text('#!/bin/sh\nexec env -u PYTHONPATH python3 -E "$@"\n')
    Path("py").chmod(0o755)
    if program:
        monkeypatch.setenv("PYTHON_EXEC", program)
    folder: Any = None
    found = Isolation(Level.OVERLAY, folder).why_not_started(parse([*words.split(), "train.py"]).torchrun)
    assert why in found
    assert bool(why) is bool(found)


def test_a_folder_that_pythonpath_cannot_name_is_an_error_before_any_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a checkout in /data/2026-11-28T10:00: a script was tuned without the checks, and no recipe was applied."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr("autoddp.wire.worker_config.INJECT", Path("/data/10:00/autoddp/inject"))
    words = ["--nproc-per-node", "2", "--dry-run", "train.py"]
    starts: list[Callable[[], object]] = [
        lambda: prepare(parse(words), time.monotonic()),
        lambda: examine(parse(words), as_json=False),
        lambda: wrap.run([]),
    ]
    for begin in starts:
        with pytest.raises(UsageError, match=r"^autoddp is in /data/10:00/autoddp, and gets"):
            begin()
    assert capsys.readouterr().out == ""
    prepare(parse(["--trials", "0", *words]), time.monotonic())


def test_a_copy_that_has_no_name_yet_ends_tuning_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lmdb or HDF5 opens to change, the kernel copies whole: until that is done, no file in the layers grows."""
    free = [100 << 30]
    monkeypatch.setattr("autoddp.attempts.isolating._free", lambda _: free[0])
    folder: Any = None
    isolation = Isolation(Level.OVERLAY, folder, "", 20 << 30, _layers=tmp_path, _least_free=50 << 30)
    assert Written(isolation, "tuning").too_much() == ""
    free[0] = 40 << 30
    assert Written(isolation, "tuning").too_much() == "only 40.0 GiB are left on the disk of the scratch folder"


def test_a_copy_is_seen_while_many_files_are_not_counted_again_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting half a million files takes seconds, and is done again only after twenty times as long."""
    monkeypatch.setattr("autoddp.attempts.isolating._free", lambda _: 15 << 30)
    folder: Any = None
    isolation = Isolation(Level.OVERLAY, folder, "", 20 << 30, _layers=tmp_path, _least_free=16 << 30)
    written = Written(isolation, "tuning", _look_after=time.monotonic() + 60)
    assert written.too_much() == "only 15.0 GiB are left on the disk of the scratch folder"


@pytest.mark.parametrize("layers", [True, False], ids=["overlay", "guard"])
def test_files_without_bytes_end_tuning_before_no_more_can_be_made(
    layers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set of links, or of empty files, has no bytes that could count: a disk has only so many inodes."""
    free = [1_300_000]
    monkeypatch.setattr("autoddp.attempts.isolating._free_files", lambda _: free[0])
    monkeypatch.setattr("autoddp.attempts.isolating._places", lambda _: [tmp_path])
    folder = RunFolder(tmp_path / "out")
    keeper: Any = SimpleNamespace(removes=lambda _: None, why_no_overlay=lambda _: "")
    isolation, _ = _overlay(parse(["train.py"]), folder, keeper)
    assert isolation is not None
    isolation = isolation if layers else isolation.under_guard("")
    assert isolation.fills_the_disk() == ""
    free[0] = 640_000
    assert isolation.fills_the_disk() == "only 640000 more files can be made on the disk of the scratch folder"
    folder.clean()


def test_others_may_use_a_large_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it may go to another job while this one is tuned: 500 GiB that are left are enough."""
    monkeypatch.setattr("autoddp.attempts.isolating._free", lambda _: 1 << 40)
    monkeypatch.setattr("autoddp.attempts.isolating._places", lambda _: [tmp_path])
    folder = RunFolder(tmp_path / "out")
    keeper: Any = SimpleNamespace(removes=lambda _: None, why_no_overlay=lambda _: "")
    isolation, _ = _overlay(parse(["train.py"]), folder, keeper)
    assert isolation is not None
    monkeypatch.setattr("autoddp.attempts.isolating._free", lambda _: 500 << 30)
    assert isolation.fills_the_disk() == ""
    folder.clean()


@pytest.mark.parametrize(("there", "starts"), [("helper", True), ("helper uvm", False), ("", False)])
def test_cuda_is_used_before_an_attempt_where_nothing_has_used_it(
    there: str, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an attempt, the program that makes its device files has no rights: the script would find no GPU."""
    for name in there.split():
        (tmp_path / name).touch()
    monkeypatch.setattr(isolating, "_HELPER", tmp_path / "helper")
    monkeypatch.setattr(isolating, "_UVM", tmp_path / "uvm")
    monkeypatch.setattr(isolating, "_USE_CUDA", f"open({str(tmp_path / 'used')!r}, 'w')")
    folder = RunFolder(tmp_path / "out")
    keeper: Any = None  # guard needs none to be chosen
    choose_isolation(parse(["--isolation", "guard", "train.py"]), folder, keeper)
    assert (tmp_path / "used").exists() is starts
    folder.clean()


def test_a_driver_that_hangs_is_waited_for_no_longer_than_it_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper").touch()
    monkeypatch.setattr(isolating, "_HELPER", tmp_path / "helper")
    monkeypatch.setattr(isolating, "_UVM", tmp_path / "uvm")
    monkeypatch.setattr(isolating, "_USE_CUDA", "import time; time.sleep(600)")
    monkeypatch.setattr(isolating, "_CUDA_STARTS", 0.1)
    started: list[subprocess.Popen[bytes]] = []

    def popen(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*words, **options))
        return started[-1]

    monkeypatch.setattr(isolating, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))
    isolating.use_cuda_once()
    assert started[0].wait(60) == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the overlay")
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, None], ids=["stream", "packets", "ended"])
def test_no_overlay_parts_a_job_from_its_mps_daemon(
    kind: int | None, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients would make the files that it looks for, and write to its pipe, where it never sees them."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(temporary))
    monkeypatch.setattr("autoddp.attempts.isolating._places", lambda _: [tmp_path])
    folder, keeper = RunFolder(tmp_path / "out"), SimpleNamespace(removes=print, why_no_overlay=lambda _: "")
    with socket.socket(socket.AF_UNIX, kind or socket.SOCK_STREAM) as daemon:
        daemon.bind(str(temporary / "control"))
        if kind is not None:
            daemon.listen()
        isolation = choose_isolation(parse(["train.py"]), folder, keeper)  # type: ignore[arg-type]
        assert isolation.level is (Level.OVERLAY if kind is None else Level.GUARD)
        assert (f"MPS daemon at {temporary}" in isolation.says("tuning")) is (kind is not None)
        may_write = isolation.under_guard("").shelter(0, folder.path, folder.path).real
        assert (str(temporary) in may_write) is (kind is not None)
        if kind is not None:
            with pytest.raises(UsageError, match=r"^--isolation overlay: NVIDIA's MPS daemon"):
                choose_isolation(parse(["--isolation", "overlay", "train.py"]), folder, keeper)  # type: ignore[arg-type]
    folder.clean()


@pytest.mark.whole
def test_what_a_script_prints_fills_no_disk(tmp_path: Path) -> None:
    folder = folder_with_state(tmp_path)
    env = {**LONG, "PRINTS": "1"}
    launch = run(AUTODDP, folder, "stateful.py", "--trials", "1", "--tune-only", "--allow", "exact", env=env)
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert "autoddp: chosen: " in launch.stderr
    assert "launching" not in launch.stderr
    logs = list(folder.glob(".autoddp/2*/attempt*/*/*/*/stdout.log"))
    assert len(logs) >= 2
    assert all(log.stat().st_size <= 64 << 20 for log in logs)
    first = next(log for log in logs if "attempt0" in str(log) and log.parent.name == "0").read_text()
    assert first.startswith("state: the user's")
    assert "MiB left out here]" in first
    assert oct(folder.joinpath(".autoddp").stat().st_mode & 0o777) == "0o700"


def words_of(pid: int) -> bytes:
    """The command of a process; none if it has ended meanwhile."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def killed(tmp_path: Path, temporary: Path, kill: Callable[[Launch], None]) -> Launch:
    """A tuning run that is killed in the middle of its trials."""
    folder = folder_with_state(tmp_path)
    words = ["--nproc-per-node", "2", "--trials", "20", "--tune-only", "--diagnose-budget", "0"]
    words += [str(SCRIPTS / "plain.py")]
    launch = start(AUTODDP, folder, words, {"TUNED_TIMES_LONGER": "1000000", "TMPDIR": str(temporary)})
    wait_for(lambda: "trial " in launch.stderr, "the first trial")
    assert len(launch.processes()) >= 5  # launcher, keeper, agent, two ranks
    kill(launch)
    launch.process.wait(30)
    return launch


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    launch = killed(tmp_path, temporary, lambda launch: launch.process.kill())
    wait_for(lambda: not launch.processes(), "the end of every process")
    assert list(temporary.iterdir()) == []
    assert list(launch.folder.glob(".autoddp/2*/autoddp-*")) == []


def test_a_launcher_that_is_killed_leaves_nothing_that_guard_has_redirected(tmp_path: Path) -> None:
    """It lies in the run's folder, and may be many checkpoints."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "saves.py").write_text("import time\nopen('model.pt', 'w').write('weights')\ntime.sleep(600)\n")
    launch = start(AUTODDP, folder, ["--nproc-per-node", "2", "--tune-only", "--isolation", "guard", "saves.py"])
    wait_for(lambda: any(folder.glob(".autoddp/2*/attempt0/written/upper/**/model.pt")), "what the script writes")
    launch.process.kill()
    launch.process.wait(30)
    wait_for(lambda: not launch.processes(), "the end of every process")
    assert [*folder.glob(".autoddp/2*/attempt0/written"), *folder.glob(".autoddp/2*/caches")] == []


def test_what_a_killed_keeper_leaves_is_cleaned_at_the_next_start(tmp_path: Path, temporary: Path) -> None:
    def kill_all_of_ours(launch: Launch) -> None:
        """The launcher, the keeper and the agent, at once; the ranks are on their own."""
        ours = [pid for pid in launch.processes() if b"autoddp" in words_of(pid)]
        for pid in ours:
            os.kill(pid, signal.SIGSTOP)
        for pid in ours:
            os.kill(pid, signal.SIGKILL)

    launch = killed(tmp_path, temporary, kill_all_of_ours)
    wait_for(lambda: not launch.processes(), "the end of every process")
    assert list(temporary.iterdir()) != []
    (launch.folder / "other.py").touch()
    again = start(AUTODDP, launch.folder, ["--tune-only", "other.py"], {"TMPDIR": str(temporary)}).wait()
    assert again.returncode == 1
    assert "no recipe was written: the script built no DistributedDataParallel model" in again.stderr
    assert "cleaned what a killed run left" in again.stderr
    assert list(temporary.iterdir()) == []
    assert list(again.folder.glob(".autoddp/2*/autoddp-*")) == []


def test_a_host_without_the_overlay_refuses_it_in_one_line(tmp_path: Path) -> None:
    """A namespace of an overlay is such a host: no upper layer can lie on another overlay."""
    inside = (
        "import os, sys\n"
        "from autoddp.cli.main import main\n"
        "from autoddp.isolation.overlay import Layers, enter\n"
        "enter(Layers(sys.argv[1] + '/0', sys.argv[1] + '/kept'), [], [os.getcwd()])\n"
        "sys.argv = ['autoddp', *sys.argv[2:]]\n"
        "main()\n"
    )
    command = (sys.executable, "-c", inside, str(tmp_path / "layers"))
    words = ["--nproc-per-node", "2", "--isolation", "overlay", str(SCRIPTS / "plain.py")]
    launch = start(command, tmp_path / "run", words).wait()
    assert launch.returncode == 2, launch.stderr
    assert launch.stderr.count("\n") == 1
    assert launch.stderr.startswith("autoddp: error: --isolation overlay: ")


@pytest.mark.skipif(not may_bind(), reason="needs root, to become a user with mounts")
@pytest.mark.parametrize("is_named", [False, whole(True)], ids=["unnamed", "named by an argument"])
def test_a_folder_that_the_overlay_of_a_user_cannot_cover_is_written_under_guard(is_named: bool) -> None:
    """An ordinary user's overlay cannot lie over a folder with mounts below it, which is read-only then."""
    writes = "import os\nopen(os.environ['DATA'] + '/new-' + os.environ['RANK'], 'w').write('x')\n"
    writes += "os.write(1, b'written\\n')\n"  # in one write: the lines of two ranks do not mix
    with Room(ORDINARY, private=False) as room:  # the checkout may be below /tmp
        data = room.part("elsewhere")
        (data / "mounted").mkdir()
        (room.work / "writes.py").write_text(writes)
        room.settle()
        lines = [*_readable_interpreter(), f"mount -t tmpfs none {data}/mounted", f"cd {room.work}", 'exec "$@"']
        as_root = ["unshare", "-m", "--propagation", "private", "bash", "-c", " && ".join(lines), "room"]
        words = ["--nproc-per-node", "2", "writes.py", *([f"--output={data}/not/there/yet"] if is_named else [])]
        command = [*as_root, *room.prefix(), *AUTODDP, *words]
        env = room.environment({"DATA": str(data)})
        done = subprocess.run(command, cwd=room.work, env=env, capture_output=True, text=True, timeout=300)
        made = sorted(path.name for path in data.iterdir())
    assert done.returncode == 0, done.stderr
    assert made == ["mounted", "new-0", "new-1"]
    assert done.stdout == "written\n" * 2
    if is_named:
        assert "isolation: overlay" not in done.stderr
        assert "no overlay: the overlay cannot be mounted (there are mounts below" in done.stderr
    else:
        assert "another attempt; isolation: guard" in done.stderr
        assert "this folder cannot be changed under the overlay: [Errno 30] Read-only file system" in done.stderr


@pytest.mark.skipif(not may_bind(), reason="needs root, to become a user beside another one")
def test_a_database_of_another_user_is_written_under_guard() -> None:
    """In a user's overlay no file of another owner can be changed. SQLite says that in words of its own."""
    writes = (
        "import os, sqlite3\n"
        "with sqlite3.connect('runs.db', timeout=60) as database:\n"
        "    database.execute('insert into runs values (1)')\n"
        "os.write(1, b'written\\n')\n"
    )
    with Room(ORDINARY, private=False) as room:  # the checkout may be below /tmp
        (room.work / "writes.py").write_text(writes)
        room.settle()
        with contextlib.closing(sqlite3.connect(room.work / "runs.db")) as database:
            database.execute("create table runs (number)")
        (room.work / "runs.db").chmod(0o666)
        lines = [*_readable_interpreter(), f"cd {room.work}", 'exec "$@"']
        as_root = ["unshare", "-m", "--propagation", "private", "bash", "-c", " && ".join(lines), "room"]
        command = [*as_root, *room.prefix(), *AUTODDP, "--nproc-per-node", "2", "writes.py"]
        done = subprocess.run(
            command, cwd=room.work, env=room.environment({}), capture_output=True, text=True, timeout=300
        )
        with contextlib.closing(sqlite3.connect(room.work / "runs.db")) as database:
            written = database.execute("select count(*) from runs").fetchone()
    assert (done.returncode, done.stdout, written) == (0, "written\n" * 2, (2,)), done.stderr
    assert "another attempt; isolation: guard" in done.stderr
    assert "files of another group cannot be changed under the overlay: attempt to write a readonly" in done.stderr


@pytest.mark.skipif(not may_bind(), reason="needs the overlay")
def test_what_is_mounted_at_its_first_use_is_found_under_guard(tmp_path: Path) -> None:
    """autofs mounts a folder in the host's namespace alone. In that of an attempt the kernel then says ELOOP."""
    script = tmp_path / "reads.py"
    script.write_text(
        "import errno, os\n"
        "if '\"overlay\"' in os.environ.get('AUTODDP_WORKER_ISOLATION', ''):\n"
        "    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), '/net/data')\n"
        "os.write(1, b'read\\n')\n"
    )
    launch = run(AUTODDP, tmp_path / "run", str(script))
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert "another attempt; isolation: guard" in launch.stderr
    assert "nothing is mounted at its first use under the overlay: [Errno 40]" in launch.stderr


@pytest.mark.skipif(not may_bind(), reason="needs the overlay")
def test_a_script_that_empties_its_folder_and_the_temporary_one_does_so_under_guard(
    tmp_path: Path, temporary: Path
) -> None:
    """The attempt's logs and its socket are mounts in these folders, and ranks write there meanwhile."""
    script = tmp_path / "empties.py"
    script.write_text(
        "import os, shutil, tempfile\n"
        "for folder in ['.', tempfile.gettempdir()] if os.environ['RANK'] == '0' else []:\n"
        "    for path in [os.path.join(folder, name) for name in os.listdir(folder)]:\n"
        "        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)\n"
        "os.write(1, b'emptied\\n')\n"
    )
    launch = run(AUTODDP, tmp_path / "run", str(script), env={"TMPDIR": str(temporary)})
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert "another attempt; isolation: guard" in launch.stderr
    assert "this folder cannot be removed under the overlay: [Errno" in launch.stderr
    assert "the script built no DistributedDataParallel model" in launch.stderr, launch.stderr
    assert launch.stdout == "emptied\n" * 2
    assert list(temporary.iterdir()) == []


@pytest.mark.whole
@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK) or not may_bind(), reason="needs root and FUSE")
def test_a_file_system_that_does_not_answer_costs_the_overlay_and_no_more(tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    dead.mkdir()
    command = (sys.executable, str(ROOT / "tests/dead_mount.py"), str(dead), *AUTODDP)
    launch = run(command, tmp_path / "run", "plain.py", "--trials", "1", "--allow", "exact", env=LONG)
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert "autoddp: looking at the file systems of this host takes long: one of them may not answer" in launch.stderr
    assert f"no overlay: the file system at {dead} does not answer" in launch.stderr
    assert "autoddp: as written " in launch.stderr
    assert launch.processes() == []


TAKES_PORTS = """
import socket, sys
from autoddp.isolation.ports import note_ports

note_ports(sys.argv[1])


def server(number, reuses=0):
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
    taken.bind(("127.0.0.1", number))
    taken.listen()
    return taken


def is_used(taken):
    with socket.create_connection(taken.getsockname()):
        taken.accept()[0].close()  # its own end closes first, so the system keeps its port


server(0)
is_used(server(int(sys.argv[2])))
is_used(server(int(sys.argv[3]), reuses=1))
try:
    server(int(sys.argv[4]))
except OSError:
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="by Linux's rules for ports")
def test_the_job_waits_for_a_port_that_only_the_system_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of the user's own without SO_REUSEADDR: the job would fail by "Address already in use"."""
    with socket.create_server(("127.0.0.1", 0)) as others:
        own, another, taken = free_port(), free_port(), str(others.getsockname()[1])
        words = [sys.executable, "-c", TAKES_PORTS, str(tmp_path), own, another, taken]
        subprocess.run(words, cwd=ROOT, check=True)
        noted = noted_ports(str(tmp_path))
        assert noted == {int(own), int(taken)}
        assert ports_kept(noted) == [int(own)]  # not where another program listens
    answers = [[int(own)], [int(own)], []]
    monkeypatch.setattr(preparation, "ports_kept", lambda _: answers.pop(0) if answers else [])
    monkeypatch.setattr(preparation, "_LOOKS", 0.0)
    preparation.await_ports(noted)
    assert answers == []


class Waited(Exception):
    """Stands for a start of the script."""


@pytest.mark.parametrize("live", [True, False])
def test_the_next_start_waits_for_such_a_port_too(live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No longer than tuning may take: each start of a script is a trial, which would count as failed."""
    (tmp_path / "port-28771").touch()

    def waits(noted: set[int], at_most: float | None) -> None:
        raise Waited(noted, at_most)

    monkeypatch.setattr(tune if live else objective, "await_ports", waits)
    tuning: Any = object.__new__(tune.Tuning if live else objective.ObjectiveTuning)
    tuning._isolation = SimpleNamespace(why_not_started=lambda torchrun: "")
    tuning._torchrun, tuning._folder = None, SimpleNamespace(sockets=tmp_path)
    tuning._until = SimpleNamespace(left=7.0)
    job: Any = SimpleNamespace(machine=SimpleNamespace(at_most=7.0))
    with pytest.raises(Waited) as waited:
        tuning._attempt(1, job, {}) if live else tuning._made(objective._Order(True))
    assert waited.value.args == ({28771}, 7.0)
