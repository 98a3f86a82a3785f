"""A run folder, and what is removed of earlier ones: all that a killed launcher left, and nothing else whatever."""

from __future__ import annotations

import codecs
import ctypes
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launchers import environment, whole

from autoddp.errors import UsageError
from autoddp.knobs import AS_WRITTEN
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, save
from autoddp.runs.folder import RunFolder, clean_leftovers, remove_older_runs
from autoddp.runs.owner import MARK, Mark, read_mark
from autoddp.runs.removal import opened, remove_contents, remove_entry, remove_folder

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = """
import sys
from pathlib import Path
from autoddp.runs.folder import RunFolder

folder = RunFolder(Path("out"), places=[Path("place")])
for number in range(2):
    attempt = folder.attempt(number)
    for name in ("scratch", "written"):
        (attempt / name).mkdir()
        (attempt / name / "checkpoint.pt").write_text("of the trial")
    (attempt / "log").write_text("said")
(folder.path / "caches").mkdir()
layers = folder.private(Path("place"))
(layers / "upper").mkdir()
(layers / "upper" / "checkpoint.pt").write_text("of the trial")
exec(sys.argv[1])
print(folder.path.name, layers.name, Path(folder.socket).parent.name, flush=True)
sys.stdin.read()
"""


@dataclass
class Launcher:
    """A run's launcher in a process of its own, and what it made."""

    process: subprocess.Popen[str]
    run: Path
    layers: Path
    private: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0

    @property
    def folders(self) -> list[Path]:
        """What must vanish when it was killed."""
        inside = [self.run / f"attempt{n}" / name for n in (0, 1) for name in ("scratch", "written", "heartbeats")]
        return [self.layers, self.private, self.run / "caches", *inside]

    def is_whole(self) -> bool:
        return all(folder.is_dir() for folder in self.folders) and (self.run / "attempt1" / "log").is_file()

    def is_cleaned(self) -> bool:
        return not any(folder.exists() for folder in self.folders) and (self.run / "attempt1" / "log").is_file()


class Host:
    """A working folder with an output folder, a temporary folder and a place for layers, all of this test alone."""

    def __init__(self, root: Path) -> None:
        self.root, self.output, self.temporary, self.place = root, root / "out", root / "tmp", root / "place"
        self.launchers: list[Launcher] = []
        for folder in (self.temporary, self.place):
            folder.mkdir()

    def launcher(self, more: str = "") -> Launcher:
        # Not a fork of this process, which would have whatever an earlier test has left in it.
        own = {**environment(), "TMPDIR": str(self.temporary)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", LAUNCHER, more], cwd=self.root, env=own, **pipes)
        assert process.stdout is not None
        run, layers, private = process.stdout.readline().split()
        found = Launcher(process, self.output / run, self.place / layers, self.temporary / private)
        self.launchers.append(found)
        assert found.is_whole()
        return found

    def killed(self, more: str = "") -> Launcher:
        found = self.launcher(more)
        found.kill()
        return found

    def ended(self, more: str = "") -> Launcher:
        found = self.launcher(more)
        found.end()
        return found

    def clean(self) -> list[str]:
        """As the next run does at its start."""
        return clean_leftovers(self.output, [self.temporary, self.place])


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(Path(os.path.realpath(tmp_path)))
    monkeypatch.setattr("tempfile.tempdir", str(made.temporary))
    monkeypatch.chdir(made.root)
    yield made
    for launcher in made.launchers:
        launcher.process.kill()
        launcher.process.communicate()


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host with one killed launcher, for tests after which all is there again: `dead`."""
    made = Host(Path(os.path.realpath(tmp_path_factory.mktemp("killed_once"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(made.temporary))
        patch.chdir(made.root)
        made.killed()
    yield made
    made.launchers[0].process.communicate()


@pytest.fixture
def dead(killed_once: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """The host, whose launcher's marks are as they were when the test is over."""
    monkeypatch.chdir(killed_once.root)
    (launcher,) = killed_once.launchers
    marks = [folder / "owner.json" for folder in (launcher.run, launcher.layers, launcher.private)]
    texts = [mark.read_bytes() for mark in marks]
    yield killed_once
    assert launcher.is_whole()
    for mark, text in zip(marks, texts, strict=True):
        if mark.is_dir():
            mark.rmdir()
        else:
            mark.unlink(missing_ok=True)
        mark.write_bytes(text)


def snapshot(folder: Path) -> dict[str, Any]:
    """Every name, mode and content below a folder."""
    found: dict[str, Any] = {}
    for path in [folder, *folder.rglob("*")]:
        here = path.lstat()
        content: Any = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path)] = (here.st_mode, here.st_uid, content)
    return found


def precious(folder: Path) -> dict[str, Any]:
    """Make something of the user's."""
    (folder / "deep" / "er").mkdir(parents=True)
    for place in (folder, folder / "deep", folder / "deep" / "er"):
        (place / "model.pt").write_text("weeks of training")
    (folder / "link").symlink_to("model.pt")
    return snapshot(folder)


def remark(folder: Path, **values: Any) -> None:
    """Change a folder's mark; `owner_pid` is the pid of its owner."""
    file = folder / "owner.json"
    plain = json.loads(file.read_text())
    for name, value in values.items():
        if name.startswith("owner_"):
            plain["owner"][name.removeprefix("owner_")] = value
        else:
            plain[name] = value
    file.write_text(json.dumps(plain))


# The folder itself


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_all_that_a_run_makes_is_for_its_user_alone(host: Host) -> None:
    before = os.umask(0o022)
    try:
        folder = RunFolder(host.root / "a" / "b" / "c")
        layers = folder.private(host.place)
    finally:
        os.umask(before)
    made = [folder.path, Path(folder.socket).parent, layers, *(host.root / "a" / part for part in ("", "b", "b/c"))]
    assert [mode(path) for path in made] == [0o700] * 6
    assert mode(folder.path / "owner.json") == mode(layers / "owner.json") == 0o600
    folder.clean()


def test_the_socket_where_the_temporary_folder_has_a_long_path(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    long = host.root / ("t" * 110)
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = RunFolder(host.output)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(folder.socket)
    finally:
        folder.clean()
    assert not Path(folder.socket).parent.exists()


def test_a_folder_that_is_there_keeps_its_mode(host: Host) -> None:
    host.output.mkdir(mode=0o755)
    host.output.chmod(0o755)
    RunFolder(host.output / "deeper").clean()
    assert mode(host.output) == 0o755


@pytest.mark.parametrize("blocked", ["file", "file/below", "broken", "broken/below"])
def test_an_output_that_cannot_be_written(host: Host, blocked: str) -> None:
    (host.root / "file").touch()
    (host.root / "broken").symlink_to("nowhere")
    with pytest.raises(UsageError, match=f"--output {blocked}: cannot be written"):
        RunFolder(Path(blocked))
    assert sorted(path.name for path in host.root.iterdir()) == ["broken", "file", "place", "tmp"]


def test_equal_hosts_ids_and_seconds_do_not_collide(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that share a folder, each with process 7 on a host called `worker`."""
    monkeypatch.setattr("time.strftime", lambda _: "20261121-200000")
    monkeypatch.setattr("socket.gethostname", lambda: "worker.example.org")
    found: list[RunFolder] = []
    threads = [threading.Thread(target=lambda: found.append(RunFolder(host.output))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    name = f"20261121-200000-worker-{os.getpid()}"
    assert sorted(folder.path.name for folder in found) == [name, *(f"{name}-{number}" for number in range(2, 9))]
    assert len({folder.socket for folder in found}) == 8
    for folder in found:
        folder.clean()


@pytest.mark.parametrize("name", ["", "../../etc", "a b\n", "x" * 300, "ü" * 200])
def test_a_strange_host_name(host: Host, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)
    folder = RunFolder(host.output)
    assert folder.path.parent == host.output
    assert folder.path.name.isascii()
    assert folder.path.name.isprintable()
    folder.clean()


def test_the_mark(host: Host) -> None:
    folder = RunFolder(host.output)
    layers = folder.private(host.place)
    plain = json.loads((folder.path / "owner.json").read_text())
    assert plain["owner"]["pid"] == os.getpid()
    assert plain["folders"] == [os.path.dirname(folder.socket), str(layers)]
    assert plain["run"] == json.loads((layers / "owner.json").read_text())["run"] == folder.path.name
    folder.clean()


def test_clean_removes_what_the_run_made_and_no_more(host: Host) -> None:
    theirs = precious(host.root / "theirs")
    folder = RunFolder(host.output)
    scratch = folder.attempt(0) / "scratch"
    (scratch / "deep").mkdir(parents=True)
    for target in ("../../../../theirs", str(host.root / "theirs")):
        (scratch / "deep" / f"link{len(target)}").symlink_to(target)
    os.link(host.root / "theirs" / "model.pt", scratch / "hard")
    layers = folder.private(host.place)
    (layers / "out").symlink_to(host.root / "theirs")
    folder.journal.write_text("kept")
    folder.clean()
    assert not scratch.exists()
    assert (folder.path / "attempt0").is_dir()
    assert folder.journal.read_text() == "kept"
    assert os.listdir(host.place) == os.listdir(host.temporary) == []
    assert snapshot(host.root / "theirs") == theirs
    folder.clean()  # again: nothing to do, nothing raised


def test_what_a_script_has_frozen_is_removed(host: Host) -> None:
    run = RunFolder(host.output)
    written = run.attempt(0) / "written"
    (written / "folder").mkdir(parents=True)
    files = [written / "immutable", written / "folder" / "log"]
    for file in files:
        file.write_text("x")
    frozen = [("+i", files[0]), ("+a", files[1]), ("+a", written / "folder"), ("+i", written)]
    try:
        for flag, path in frozen:
            if shutil.which("chattr") is None or subprocess.run(["chattr", flag, path], capture_output=True).returncode:
                pytest.skip("this user, or this file system, has no such flags")
        run.forget_what_was_written(0)
        assert not written.exists()
    finally:
        for _, path in reversed(frozen):
            if path.exists():
                subprocess.run(["chattr", "-i", "-a", path], check=False)


@pytest.mark.parametrize("place", ["attempt0", "attempt0/scratch", "attempt0/written", "caches"])
def test_links_in_place_of_our_folders_are_not_followed(host: Host, place: str) -> None:
    theirs = host.root / "theirs"
    for name in ("scratch", "written", "heartbeats"):
        precious(theirs / name)
    before = snapshot(theirs)
    folder = RunFolder(host.output)
    (folder.path / place).parent.mkdir(exist_ok=True)
    (folder.path / place).symlink_to(theirs)
    folder.clean()
    assert snapshot(theirs) == before


def test_a_private_folder_that_was_replaced_is_not_removed(host: Host) -> None:
    """By a link, by another folder, by a copy."""
    folder = RunFolder(host.output)
    theirs = precious(host.root / "theirs")
    linked, other, copied = (folder.private(host.place) for _ in range(3))
    linked.rename(host.root / "moved")
    linked.symlink_to(host.root / "theirs")
    other.rename(host.root / "moved2")
    mine = precious(other)
    copied.rename(host.root / "moved3")
    shutil.copytree(host.root / "moved3", copied)
    folder.clean()
    assert snapshot(host.root / "theirs") == theirs
    assert snapshot(other) == mine
    assert (copied / "owner.json").is_file()
    assert all((host.root / name / "owner.json").is_file() for name in ("moved", "moved2", "moved3"))


def test_what_exists_is_never_taken(host: Host) -> None:
    folder = RunFolder(host.output)
    before = precious(host.place / "mine")
    with pytest.raises(FileExistsError):
        folder.owns(host.place / "mine")
    folder.clean()
    assert snapshot(host.place / "mine") == before


def test_a_forked_child_removes_nothing(host: Host) -> None:
    folder = RunFolder(host.output)
    scratch = folder.attempt(0) / "scratch"
    scratch.mkdir()
    child = os.fork()
    if child == 0:
        folder.clean()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert scratch.is_dir()
    assert Path(folder.socket).parent.is_dir()
    folder.clean()


def test_an_ended_launcher_leaves_nothing_elsewhere(host: Host) -> None:
    """Also where it never came to tuning, and so nobody called `clean`."""
    launcher = host.ended()
    assert launcher.is_cleaned()
    assert os.listdir(host.temporary) == os.listdir(host.place) == []
    assert json.loads((launcher.run / "owner.json").read_text())["ended"] is True


# What a killed launcher left


def test_a_killed_launcher_is_cleaned_up_after(host: Host) -> None:
    launcher = host.killed()
    folder = RunFolder(host.output, places=[host.place])
    assert launcher.is_cleaned()
    (line,) = folder.says
    assert line.startswith("cleaned what a killed run left: ")
    assert all(str(path) in line for path in (launcher.layers, launcher.private, launcher.run))
    folder.clean()
    assert RunFolder(host.output).says == ()


def test_a_living_launcher_is_left_alone(host: Host) -> None:
    launcher = host.launcher()
    assert host.clean() == []
    assert launcher.is_whole()
    launcher.end()


def test_a_stopped_launcher_lives(host: Host) -> None:
    launcher = host.launcher()
    launcher.process.send_signal(signal.SIGSTOP)
    assert host.clean() == []
    assert launcher.is_whole()


def test_a_launcher_lives_without_its_lock(host: Host) -> None:
    """Some network file systems have none: the process id decides."""
    launcher = host.launcher("folder._claim.close(); [claim.close() for claim in folder._claims]")
    assert host.clean() == []
    assert launcher.is_whole()
    launcher.kill()
    host.clean()
    assert launcher.is_cleaned()


def test_a_child_that_holds_the_lock_lives_for_its_launcher(host: Host) -> None:
    """The process that watches over attempts outlives a killed launcher, and ends them first."""
    lives = "os.close(1); time.sleep(100)"
    launcher = host.launcher(
        f"import os, time\nchild = os.fork()\nif child == 0:\n    {lives}\nPath('child').write_text(str(child))"
    )
    launcher.kill()
    assert host.clean() == []
    assert launcher.is_whole()
    os.kill(int((host.root / "child").read_text()), signal.SIGKILL)
    for _ in range(500):
        if launcher.is_cleaned():
            break
        time.sleep(0.01)
        host.clean()
    assert launcher.is_cleaned()


def test_a_killed_launcher_that_nobody_has_waited_for(host: Host) -> None:
    launcher = host.launcher()
    launcher.process.kill()
    os.waitid(os.P_PID, launcher.process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    host.clean()
    assert launcher.is_cleaned()


def test_another_process_has_the_id_now(host: Host) -> None:
    launcher = host.killed()
    for folder in (launcher.run, launcher.layers, launcher.private):
        remark(folder, owner_pid=os.getpid())
    host.clean()
    assert launcher.is_cleaned()


def test_a_private_folder_whose_run_folder_is_gone(host: Host) -> None:
    launcher = host.killed()
    shutil.rmtree(launcher.run)
    assert sorted(host.clean()) == sorted([str(launcher.layers), str(launcher.private)])
    assert os.listdir(host.temporary) == os.listdir(host.place) == []


OTHERS: dict[str, dict[str, Any]] = {
    "another host": {"owner_host": "another", "owner_boot_id": ""},
    "another host, another boot": {"owner_host": "another", "owner_boot_id": "x"},
    "another host that ended": {"owner_host": "another", "owner_boot_id": "x", "ended": True},
    "a container, no lock": {"owner_pid_namespace": "pid:[1]", "locked": False},
}


@pytest.mark.parametrize("values", OTHERS.values(), ids=OTHERS)
def test_what_may_live_elsewhere_is_left_alone(host: Host, values: dict[str, Any]) -> None:
    launcher = host.killed()
    for folder in (launcher.run, launcher.layers, launcher.private):
        remark(folder, **values)
    assert host.clean() == []
    assert launcher.is_whole()


GONE: dict[str, dict[str, Any]] = {
    "before the machine was started anew": {"owner_boot_id": "x", "owner_pid": os.getpid()},
    "the same, without locks": {"owner_boot_id": "x", "owner_pid": os.getpid(), "locked": False},
    "a container that is gone": {"owner_pid_namespace": "pid:[1]", "owner_pid": 1},
    "one with a host name of its own": {"owner_host": "3f2a", "owner_pid_namespace": "pid:[1]", "owner_pid": 1},
    "no id of that size": {"owner_pid": 2**70},
}


@pytest.mark.parametrize("values", GONE.values(), ids=GONE)
def test_what_cannot_live_is_cleaned(host: Host, values: dict[str, Any]) -> None:
    launcher = host.killed()
    for folder in (launcher.run, launcher.layers, launcher.private):
        remark(folder, **values)
    host.clean()
    assert launcher.is_cleaned()


def test_a_lock_that_is_held_stands_for_life(host: Host) -> None:
    """Two hosts of one name that share a folder: the other one's boot and process mean nothing here."""
    launcher = host.launcher()
    folders = (launcher.run, launcher.layers, launcher.private)
    texts = [(folder / "owner.json").read_text() for folder in folders]
    for name, values in (GONE | OTHERS).items():
        for folder, text in zip(folders, texts, strict=True):
            (folder / "owner.json").write_text(text)
            remark(folder, **values)
        assert host.clean() == [], name
        assert launcher.is_whole(), name


def test_a_run_that_has_ended_and_is_not_gone_yet_stays(host: Host) -> None:
    """Its launcher has said that it ends, and has not yet."""
    launcher = host.launcher()
    remark(launcher.run, ended=True)
    assert remove_older_runs(host.output, 0, []) == []
    assert host.clean() == []
    assert launcher.is_whole()


# Marks that lie, and folders that only look like ours


HOSTILE: list[tuple[str, Callable[[Path], Any]]] = [
    ("the user's folder", str),
    ("the user's file", lambda theirs: str(theirs / "model.pt")),
    ("a link to the user's folder", lambda theirs: str(theirs.parent / "link")),
    ("through a link", lambda theirs: str(theirs.parent / "link" / "deep")),
    ("up and down", lambda theirs: f"{theirs}/deep/../../theirs"),
    ("relative", lambda _: "theirs"),
    ("the root", lambda _: "/"),
    ("the root, twice", lambda _: "//"),
    ("here", lambda _: "."),
    ("nothing", lambda _: ""),
    ("home", lambda _: os.path.expanduser("~")),
    ("a tilde", lambda _: "~"),
    ("with a slash", lambda theirs: f"{theirs}/"),
    ("a zero", lambda theirs: f"{theirs}\0"),
    ("no text", lambda _: 3),
    ("no list", lambda _: {"a": "b"}),
    ("the working folder", lambda theirs: str(theirs.parent)),
    ("the output folder", lambda theirs: str(theirs.parent / "out")),
    ("too long", lambda _: "/" + "x" * 5000),
]


@pytest.mark.parametrize(("name", "path"), HOSTILE, ids=[name for name, _ in HOSTILE])
@pytest.mark.parametrize("marked", [whole(False), True], ids=["bare", "marked"])
def test_a_record_that_names_something_of_the_users(
    host: Host, name: str, path: Callable[[Path], Any], marked: bool
) -> None:
    """Even where the run's own mark was copied into it."""
    theirs = host.root / "theirs"
    precious(theirs)
    (host.root / "link").symlink_to("theirs")
    launcher = host.killed()
    if marked:
        shutil.copy(launcher.layers / "owner.json", theirs)
        shutil.copy(launcher.layers / "owner.json", theirs / "deep")
    before = snapshot(theirs)
    remark(launcher.run, folders=[path(theirs)])
    host.clean()
    assert snapshot(theirs) == before
    assert launcher.run.is_dir()
    assert host.place.is_dir()


@pytest.mark.parametrize("path", ["theirs/deep/..", "theirs/.", "link", "theirs"])
def test_a_forged_mark_in_the_users_folder(host: Host, path: str) -> None:
    """It names the killed run, this folder's inode, and the very path that is recorded."""
    theirs = host.root / "theirs"
    precious(theirs)
    (host.root / "link").symlink_to("theirs")
    launcher = host.killed()
    shutil.copy(launcher.layers / "owner.json", theirs)
    remark(theirs, inode=theirs.stat().st_ino, path=f"{host.root}/{path}")
    remark(launcher.run, folders=[f"{host.root}/{path}"])
    before = snapshot(theirs)
    host.clean()
    if path == "theirs":  # no forgery could be told from our own mark: here all of it is as this run would write it
        assert not theirs.exists()
    else:
        assert snapshot(theirs) == before


def test_a_folder_of_another_run_is_not_removed_for_this_one(host: Host) -> None:
    killed, living = host.killed(), host.launcher()
    before = snapshot(living.layers)
    remark(killed.run, folders=[str(living.layers), str(living.private), str(living.run), str(killed.run)])
    host.clean()
    assert snapshot(living.layers) == before
    assert living.is_whole()
    assert killed.run.is_dir()


MALFORMED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"3",
    b'"kind"',
    b"\xff\xfe",
    b"[" * 50_000,
    b"{}" + b" " * 2**20,
    b'{"kind": "folder of an autoddp run"}',
    b'{"name": "somebody elses", "owner": "me"}',
]
FIELDS = [
    ("owner", None),
    ("owner", []),
    ("owner", {}),
    ("owner_pid", "12"),
    ("owner_pid", True),
    ("owner_pid", -1),
    ("owner_pid", 0),
    ("owner_pid", 1.5),
    ("owner_host", None),
    ("owner_started", 3),
    ("owner_more", "x"),
    ("more", 1),
    ("kind", "another"),
    ("run", 3),
    ("path", None),
    ("inode", "5"),
    ("made", "now"),
    ("made", float("nan")),
    ("made", float("inf")),
    ("locked", 1),
    ("ended", "yes"),
    ("folders", 3),
    ("folders", [3]),
    ("folders", None),
    ("path", "/tmp/a\0b"),
    ("owner_host", "a\0b"),
]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: repr(text[:20]))
def test_a_mark_that_is_none(dead: Host, text: bytes) -> None:
    (launcher,) = dead.launchers
    for folder in (launcher.run, launcher.layers, launcher.private):
        (folder / "owner.json").write_bytes(text)
    assert dead.clean() == []
    assert remove_older_runs(dead.output, 0, []) == []
    assert launcher.is_whole()


@pytest.mark.parametrize(("name", "value"), FIELDS)
def test_a_mark_with_a_wrong_field(dead: Host, name: str, value: Any) -> None:
    (launcher,) = dead.launchers
    remark(launcher.run, **{name: value})
    assert Mark.parse((launcher.run / "owner.json").read_bytes()) is None
    assert read_mark(launcher.run) is None


@pytest.mark.parametrize("name", ["kind", "owner", "run", "path", "inode", "made", "locked", "folders", "ended"])
def test_a_mark_without_a_field(dead: Host, name: str) -> None:
    (launcher,) = dead.launchers
    file = launcher.run / "owner.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != name}))
    assert read_mark(launcher.run) is None


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "second name", "too large"])
def test_a_mark_that_is_no_plain_file(dead: Host, tmp_path: Path, kind: str) -> None:
    (launcher,) = dead.launchers
    file = launcher.run / "owner.json"
    if kind == "second name":
        os.link(file, tmp_path / "backup.json")
    elif kind == "too large":
        file.write_text(file.read_text() + " " * 2**17)
    else:
        file.rename(tmp_path / "moved.json")
        {"pipe": os.mkfifo, "link": lambda f: f.symlink_to(tmp_path / "moved.json"), "folder": os.mkdir}[kind](file)
    assert read_mark(launcher.run) is None


def test_names_decide_nothing(host: Host) -> None:
    host.output.mkdir()
    likely = [
        host.output / "20261121-200000-node7-4711",
        host.temporary / "autoddp-1f2e3d4c",
        host.place / "autoddp-1f2e3d4c",
        host.output / "bench",
    ]
    for folder in likely:
        precious(folder)
        precious(folder / "attempt0" / "scratch")
        (folder / "owner.json").write_text('{"name": "me"}')
    before = snapshot(host.root)
    folder = RunFolder(host.output, keep_runs=1, places=[host.place])
    folder.clean()
    shutil.rmtree(folder.path)
    assert snapshot(host.root) == before
    assert folder.says == ()


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_what_the_user_rescued_is_the_users(host: Host, how: str) -> None:
    """Copied or moved away, beside the original, after a run was killed: its checkpoints may be worth something."""
    launcher = host.killed()
    take: Callable[[Path, Path], Any] = shutil.copytree if how == "copied" else os.rename
    rescued = [host.temporary / "autoddp-rescued", host.place / "autoddp-rescued", host.output / "good-run"]
    for original, copy in zip((launcher.private, launcher.layers, launcher.run), rescued, strict=True):
        take(original, copy)
    before = [snapshot(folder) for folder in rescued]
    host.clean()
    remove_older_runs(host.output, 0, [])
    assert [snapshot(folder) for folder in rescued] == before


def test_a_private_folder_moved_under_its_own_name_is_left_alone(host: Host) -> None:
    launcher = host.killed()
    shutil.rmtree(launcher.run)
    moved = host.temporary / launcher.layers.name
    launcher.layers.rename(moved)
    before = snapshot(moved)
    host.clean()
    assert snapshot(moved) == before


def test_a_copy_of_the_whole_project_is_left_alone(host: Host, tmp_path_factory: pytest.TempPathFactory) -> None:
    host.killed()
    copy = tmp_path_factory.mktemp("copy") / "project"
    shutil.copytree(host.root, copy, symlinks=True)
    before = snapshot(copy)
    clean_leftovers(copy / "out", [copy / "tmp", copy / "place"])
    assert remove_older_runs(copy / "out", 0, []) == []
    assert snapshot(copy) == before


def test_a_run_folder_in_a_moved_project_is_still_ours(host: Host) -> None:
    launcher = host.killed()
    moved = host.root / "moved"
    host.output.rename(moved)
    clean_leftovers(moved)
    assert not (moved / launcher.run.name / "attempt0" / "scratch").exists()
    assert not launcher.layers.exists()


def test_a_folder_in_which_the_user_works_stays(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = host.killed()
    monkeypatch.chdir(launcher.layers / "upper")
    host.clean()
    assert launcher.layers.is_dir()
    monkeypatch.chdir(launcher.run)
    assert remove_older_runs(host.output, 0, []) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["folder", "mark"])
def test_another_users_folder_is_left_alone(host: Host, what: str) -> None:
    launcher = host.killed()
    for folder in (launcher.run, launcher.layers, launcher.private):
        os.chown(folder / "owner.json" if what == "mark" else folder, 65534, 65534)
    assert host.clean() == []
    assert remove_older_runs(host.output, 0, []) == []
    assert launcher.is_whole()


def test_places_that_are_none(host: Host) -> None:
    assert clean_leftovers(host.root / "absent", [host.root / "absent", Path("/dev/null"), Path("")]) == []
    assert remove_older_runs(host.root / "absent", 1, []) == []


# Removing


_PR_SET_DUMPABLE = 4  # linux/prctl.h


def emptied(folder: Path, as_user: int = 0) -> bool:
    """Remove all in `folder`, as an ordinary user where this is root: root may do all without changing a mode."""
    if os.geteuid() != 0:
        with opened(folder) as handle:
            return handle is not None and remove_contents(handle)
    codecs.lookup("ascii")  # the user may not read Python's own files where these are root's
    child = os.fork()
    if child == 0:
        done = False
        try:
            handle = os.open(folder, os.O_RDONLY)  # the folders above are root's
            os.setgroups([])
            os.setgid(as_user)
            os.setuid(as_user)
            # After it the kernel may keep /proc/self from this process, which it never does to a user's own program.
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)
            done = remove_contents(handle)
        finally:
            os._exit(0 if done else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def given_to(user: int, folder: Path) -> None:
    if os.geteuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, user, user, follow_symlinks=False)


def test_folders_that_nobody_may_enter(tmp_path: Path) -> None:
    """As the work folder of an overlay."""
    top = tmp_path / "top"
    for modes in (0o000, 0o100, 0o200, 0o400, 0o500, 0o600):
        inner = top / f"{modes:o}" / "inner"
        inner.mkdir(parents=True)
        (inner / "file").touch(0o000)
    given_to(65534, top)
    for modes in (0o000, 0o100, 0o200, 0o400, 0o500, 0o600):
        (top / f"{modes:o}" / "inner").chmod(modes)
        (top / f"{modes:o}").chmod(modes)
    top.chmod(0o500)
    assert emptied(top, as_user=65534)
    assert os.listdir(top) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_folder_inside_stays_and_nothing_raises(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "mine" / "theirs").mkdir(parents=True)
    (top / "mine" / "theirs" / "file").touch()
    (top / "mine" / "file").touch()
    given_to(65534, top)
    given_to(0, top / "mine" / "theirs")
    assert not emptied(top, as_user=65534)
    assert [str(path.relative_to(top)) for path in sorted(top.rglob("*"))] == [
        "mine",
        "mine/theirs",
        "mine/theirs/file",
    ]
    assert mode(top / "mine" / "theirs") == 0o755


def test_very_deep_folders(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(1200):  # deeper than files may be open, than the stack goes, and than a path may be long
        os.mkdir("d" * 20, dir_fd=here)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        deeper = os.open("d" * 20, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    try:
        assert emptied(top)
        assert os.listdir(top) == []
    finally:  # pytest itself could not remove it
        subprocess.run(["rm", "-rf", str(top)], check=True)


def test_links_pipes_and_sockets(tmp_path: Path) -> None:
    theirs = precious(tmp_path / "theirs")
    top = tmp_path / "top"
    (top / "deep").mkdir(parents=True)
    for place in (top, top / "deep"):
        (place / "file").symlink_to(tmp_path / "theirs" / "model.pt")
        (place / "folder").symlink_to(tmp_path / "theirs")
        (place / "up").symlink_to("../..")
        (place / "loop").symlink_to("loop")
        os.mkfifo(place / "pipe")
        (place / "line\nbreak \udcff").touch()
    assert emptied(top)
    assert snapshot(tmp_path / "theirs") == theirs


def test_one_entry(tmp_path: Path) -> None:
    precious(tmp_path / "gone")
    kept = precious(tmp_path / "kept")
    with opened(tmp_path) as handle:
        assert handle is not None
        assert remove_entry(handle, "gone")
        assert remove_entry(handle, "absent")
    assert snapshot(tmp_path / "kept") == kept
    assert os.listdir(tmp_path) == ["kept"]
    with opened(tmp_path / "absent") as handle:
        assert handle is None


def test_the_mark_is_the_last_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nobody would know again what the rest of the folder is, where the removal is cut off."""
    folder = tmp_path / "private"
    for number in range(20):
        precious(folder / f"kept{number}")
    (folder / MARK).touch()
    unlink, gone = os.unlink, []
    monkeypatch.setattr(os, "unlink", lambda name, **options: (gone.append(name), unlink(name, **options)))
    remove_folder(str(folder))
    assert not folder.exists()
    assert gone[-1] == MARK


BINDS = """
set -e
mount --make-rprivate /
for place in "$2"/deep/mounted "$2"/mounted; do mkdir -p "$place"; mount --bind "$1" "$place"; done
touch "$2"/file; mount --bind "$1"/model.pt "$2"/file
chmod 000 "$2"/deep
"$3" -c 'import os, sys
from autoddp.runs.removal import remove_contents
assert remove_contents(os.open(sys.argv[1], os.O_RDONLY)) is False' "$2"
"""


def can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-m", "mount", "--make-rprivate", "/"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not can_mount(), reason="needs root and mounts")
def test_what_is_mounted_inside_is_not_entered(tmp_path: Path) -> None:
    """On the same disk too, where the device number does not tell."""
    theirs = precious(tmp_path / "theirs")
    top = tmp_path / "top"
    top.mkdir()
    (top / "ours").touch()
    command = ["unshare", "-m", "sh", "-c", BINDS, "sh", str(tmp_path / "theirs"), str(top), sys.executable]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert snapshot(tmp_path / "theirs") == theirs
    assert not (top / "ours").exists()


# How many stay


def runs(host: Host, count: int) -> list[Launcher]:
    """Finished runs, the oldest first."""
    found = [host.ended() for _ in range(count)]
    for place, launcher in enumerate(found):
        remark(launcher.run, made=1000.0 + place)
    return found


def left(found: list[Launcher]) -> list[bool]:
    return [launcher.run.exists() for launcher in found]


def recipe_of(run: str) -> Recipe:
    fits = Fits(8, 2, "nccl", ("cpu",), "2.13.0", 102228128, "0123456789abcdef")
    made_by = MadeBy("0.1.0", "2.13.0", "3.11.7", "now")
    return Recipe(made_by, fits, AS_WRITTEN, Evidence(31.0, 0.1, 20, 6, 100, "why", run))


def test_the_oldest_runs_go(host: Host) -> None:
    found = runs(host, 4)
    folder = RunFolder(host.output, keep_runs=3)
    assert left(found) == [False, False, True, True]
    assert folder.says == (f"removed the 2 oldest run folders in {host.output}: --keep-runs 3",)
    assert folder.path.is_dir()
    folder.clean()


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark that is removed while this process has it open goes by another name until it is closed, as on NFS."""
    unlink, rmdir = os.unlink, os.rmdir

    def is_open(file: os.stat_result) -> bool:
        found = []
        for number in map(int, os.listdir("/dev/fd")):
            with suppress(OSError):  # the one by which the list was read
                found.append(os.path.samestat(os.fstat(number), file))
        return any(found)

    def unlinked(name: str, *, dir_fd: int | None = None) -> None:
        if name == "owner.json" and is_open(os.stat(name, dir_fd=dir_fd)):
            os.rename(name, ".nfs0001", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(name, dir_fd=dir_fd)

    def removed(name: str, *, dir_fd: int | None = None) -> None:
        with suppress(FileNotFoundError):
            if not is_open(os.stat(f"{name}/.nfs0001", dir_fd=dir_fd)):
                unlink(f"{name}/.nfs0001", dir_fd=dir_fd)
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlinked)
    monkeypatch.setattr(os, "rmdir", removed)


def test_old_runs_on_nfs_go_whole(host: Host, nfs: None) -> None:
    """An empty folder stayed of each, without a mark by which a later run would have known it, and nothing was said."""
    found = runs(host, 3)
    folder = RunFolder(host.output, keep_runs=2)
    assert left(found) == [False, False, True]
    assert folder.says == (f"removed the 2 oldest run folders in {host.output}: --keep-runs 2",)
    folder.clean()
    assert os.listdir(host.temporary) == []


def test_no_limit_no_removal(host: Host) -> None:
    found = runs(host, 2)
    RunFolder(host.output).clean()
    assert left(found) == [True, True]


def test_one_run_stays(host: Host) -> None:
    found = runs(host, 2)
    folder = RunFolder(host.output, keep_runs=1)
    assert left(found) == [False, False]
    assert folder.path.is_dir()
    folder.clean()


@pytest.mark.parametrize("place", ["r.autoddp.toml", "elsewhere/r.cfg", "elsewhere/other.toml", "project/r.toml"])
def test_a_run_that_a_recipe_names_stays(host: Host, place: str) -> None:
    """In the current folder, where this run's recipe is or beside it, and beside the output folder."""
    for folder in ("elsewhere", "project"):
        (host.root / folder).mkdir()
    found = runs(host, 3)
    host.output.rename(host.root / "project" / "out")
    for launcher in found:
        launcher.run = host.root / "project" / "out" / launcher.run.name
    save(recipe_of(found[0].run.name), host.root / place)
    RunFolder(host.root / "project" / "out", keep_runs=1, recipe=Path("elsewhere/r.cfg")).clean()
    assert left(found) == [True, False, False]


def test_a_recipe_that_is_not_sound_any_more_names_its_run_too(host: Host) -> None:
    found = runs(host, 3)
    save(recipe_of(found[1].run.name), host.root / "r.toml")
    damaged = (host.root / "r.toml").read_bytes().replace(b"world_size = 8", b"\xff world_size ? 9")
    (host.root / "r.toml").write_bytes(damaged)
    os.mkfifo(host.root / "pipe.toml")
    (host.root / "folder.toml").mkdir()
    (host.root / "broken.toml").symlink_to("nowhere")
    RunFolder(host.output, keep_runs=1).clean()
    assert left(found) == [False, True, False]


def test_nothing_goes_where_recipes_cannot_be_read(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    found = runs(host, 2)
    (host.root / "r.toml").touch()

    def refused(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    assert remove_older_runs(host.output, 1, [host.root]) == []
    assert left(found) == [True, True]


def test_a_run_that_may_live_stays(host: Host) -> None:
    found = runs(host, 3)
    living, killed_elsewhere, ended_elsewhere, killed_here = (
        host.launcher(),
        host.killed(),
        host.ended(),
        host.killed(),
    )
    remark(killed_elsewhere.run, owner_host="another", owner_boot_id="x", folders=[])
    remark(ended_elsewhere.run, owner_host="another", owner_boot_id="x", folders=[])
    for place, launcher in enumerate((living, killed_elsewhere, ended_elsewhere, killed_here)):
        remark(launcher.run, made=100.0 + place)
    RunFolder(host.output, keep_runs=2).clean()
    assert left([living, killed_elsewhere, ended_elsewhere, killed_here]) == [True, True, False, False]
    assert left(found) == [False, False, True]
    assert living.is_whole()


def test_the_record_of_what_could_not_be_removed_stays(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = host.killed()
    monkeypatch.chdir(launcher.layers)
    RunFolder(host.output, keep_runs=1).clean()
    assert left([launcher]) == [True]


def test_a_file_of_the_users_that_a_run_put_aside_stays(host: Host) -> None:
    found = runs(host, 3)
    (found[0].run / "previous.autoddp.toml").write_text("my own notes, which a run replaced by its recipe")
    save(recipe_of("older"), found[1].run / "previous.autoddp.toml")
    (found[2].run / "previous.autoddp.toml.2").write_text("notes")
    RunFolder(host.output, keep_runs=1).clean()
    assert left(found) == [True, False, True]


def test_a_folder_without_a_mark_stays(host: Host) -> None:
    old = host.output / "20251121-200000-4711"
    (old / "pass0" / "scratch").mkdir(parents=True)
    (old / "summary.json").write_text("{}")
    before = snapshot(old)
    found = runs(host, 1)
    RunFolder(host.output, keep_runs=1).clean()
    assert snapshot(old) == before
    assert left(found) == [False]


def test_removing_a_run_follows_no_link(host: Host) -> None:
    theirs = precious(host.root / "theirs")
    (launcher,) = runs(host, 1)
    (launcher.run / "data").symlink_to(host.root / "theirs")
    (launcher.run / "attempt0" / "up").symlink_to("../../..")
    RunFolder(host.output, keep_runs=1).clean()
    assert left([launcher]) == [False]
    assert snapshot(host.root / "theirs") == theirs


def test_two_launchers_that_clean_at_once(host: Host) -> None:
    """Each may find that the other was quicker."""
    found = [host.killed() for _ in range(3)]
    threads = [threading.Thread(target=host.clean) for _ in range(4)]
    threads += [threading.Thread(target=remove_older_runs, args=(host.output, 1, [])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    host.clean()
    remove_older_runs(host.output, 1, [])
    assert sum(left(found)) == 1
    assert os.listdir(host.temporary) == os.listdir(host.place) == []


def test_reading_a_mark_leaves_nothing_open(host: Host) -> None:
    launcher = host.killed()
    before = len(os.listdir("/dev/fd"))
    for folder in (launcher.run, launcher.run / "attempt0", host.root / "absent"):
        found = read_mark(folder)
        if found is not None:
            with closing(found):
                found.may_be_cleaned()
    host.clean()
    assert len(os.listdir("/dev/fd")) == before


def test_git_adds_nothing_of_a_run(host: Host) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    Path("train.py").touch()
    host.ended()
    subprocess.run(["git", "add", "-A"], check=True)
    added = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout
    assert added.split() == ["train.py"]
