"""The overlay, as root and as an ordinary user: programs see the real files, and nothing that they do reaches them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launchers import ROOT, environment
from traces.room import ORDINARY, _readable_interpreter, may_bind
from traces.snapshot import difference, take

from autoddp.isolation.caches import keep_caches
from autoddp.isolation.kernel.mounts import Mount, mount_of, parse
from autoddp.isolation.overlay import Layers, _has_devices

pytestmark = pytest.mark.skipif(not may_bind(), reason="needs the right to mount in a namespace of its own")

ENTER = """
import json, os, sys
from autoddp.isolation.overlay import Layers, enter
base, important = sys.argv[1], sys.argv[2:]
memory = int(os.environ.get("MEMORY", sys.maxsize))
layers = Layers(base + "/layers/0", base + "/layers/kept", "SYNCS" in os.environ, memory)
read_only = enter(layers, [base + "/real"], [os.getcwd(), *important])
found = {}
"""

BEFORE_6_12 = """
import autoddp.isolation.overlay as overlay
mount = overlay.mount

def mounts_all_the_same(source, target, kind="", flags=0, data=""):
    mount(source, target, kind, flags, data.replace("index=on,", "").replace("redirect_dir=on,", ""))

overlay.mount = mounts_all_the_same
"""
"""Linux leaves out what an ordinary user may not have, and says so in its log alone."""

ENTRIES_THAT_GO = """
import os
from types import SimpleNamespace
scandir = os.scandir

def with_others(path):
    for name, is_folder in (("gone", True), ("gone_file", False)):
        more = {"is_symlink": lambda: False, "is_dir": lambda is_folder=is_folder: is_folder}
        yield SimpleNamespace(name=name, path=f"{path}/{name}", **more)
    yield from scandir(path)

os.scandir = with_others
"""


@dataclass
class Place:
    """A folder `work` with the user's files, `real` in which writes are real, and `layers`."""

    base: Path
    user: int | None

    @property
    def work(self) -> Path:
        return self.base / "work"

    def run(
        self, program: str, setup: str = "true", syncs: bool = False, kernel: str = "", **variables: str
    ) -> dict[str, object]:
        """What the program leaves in `found`; the user's files are as before. `setup`: shell, as root, before it.

        `kernel`: Python that makes this one like another.
        """
        before = take(self.work, exclude=[self.work / "pipe"])
        code = kernel + ENTER + textwrap.dedent(program) + "\nprint(json.dumps(found))"
        lines = [setup, *(_readable_interpreter() if self.user else [])]
        who = [] if self.user is None else ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        shell = " && ".join([*lines, f"cd {self.work}", 'exec "$@"'])
        command = ["unshare", "-m", "--propagation", "private", "bash", "-c", shell, "test", *who, sys.executable]
        more = {**variables, **({"SYNCS": "1"} if syncs else {})}
        env = environment(**more, HOME=str(self.base), PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(ROOT))
        done = subprocess.run([*command, "-c", code, str(self.base)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert difference(before, take(self.work, exclude=[self.work / "pipe"])) == []
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return found


def in_namespace(shell: str) -> str:
    """What shell commands print that root runs in a mount namespace of their own."""
    words = ["unshare", "-m", "--propagation", "private", "sh", "-c", shell]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.fixture(params=[None, ORDINARY], ids=["root", "ordinary user"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    # not below pytest's folder, which only root can enter
    base = Path(tempfile.mkdtemp(prefix="autoddp-overlay-", dir="/var/tmp"))
    base.chmod(0o755)
    work = base / "work"
    for folder in (work, work / "folder" / "inner", base / "real"):
        folder.mkdir(parents=True)
    (work / "ck.pt").write_text("old")
    (work / "folder" / "inner" / "a").write_text("a")
    os.link(work / "ck.pt", work / "hard.pt")
    (work / "a,b:c").mkdir()
    (work / "a,b:c" / "x").write_text("x")
    if request.param is not None:
        for path in [base, *base.rglob("*")]:
            os.chown(path, request.param, request.param)
    yield Place(base, request.param)
    subprocess.run(["chmod", "-R", "u+rwX", base], check=False)
    shutil.rmtree(base)


def test_what_is_done_under_it_is_seen_there_alone(place: Place) -> None:
    found = place.run("""
        import shutil, subprocess
        os.remove("ck.pt")
        open("new", "w").write("new")
        open("a,b:c/x", "a").write("more")
        os.system("echo shell >> log; rm -rf folder/inner; chmod 700 'a,b:c'; touch -d 2001-01-01 hard.pt")
        shutil.rmtree("folder")
        os.mkdir("folder")
        found["names"] = sorted(os.listdir("."))
        found["in the new folder"] = os.listdir("folder")
        found["appended"] = open("a,b:c/x").read()
        found["where"] = os.getcwd()
        open(base + "/real/r", "w").write("real")
        open("/dev/shm/autoddp-overlay-test", "w").write("x")
        open("/tmp/autoddp-overlay-test", "w").write("x")
        found["layers"] = os.listdir(base + "/layers/0")
        found["read only"] = read_only
        try:
            os.rmdir("/proc/self/cwd/../work")
        except OSError as error:
            found["rmdir"] = error.errno
        """)
    assert found["names"] == ["a,b:c", "folder", "hard.pt", "log", "new"]
    assert found["in the new folder"] == []
    assert found["appended"] == "xmore"
    assert found["where"] == str(place.work)
    assert found["layers"] == []  # whoever wrote there would change what lies under the overlay
    assert found["read only"] == []
    assert (place.base / "real" / "r").read_text() == "real"
    assert not os.path.exists("/dev/shm/autoddp-overlay-test")
    assert not os.path.exists("/tmp/autoddp-overlay-test")


def test_a_folder_can_be_removed_also_where_the_kernel_takes_all_options(place: Place) -> None:
    """As scripts do with the oldest checkpoint. An overlay that keeps no notes would say "Input/output error"."""
    program = """
        import shutil
        shutil.rmtree("folder")
        os.mkdir("folder")
        found["in the new folder"] = os.listdir("folder")
        """
    assert place.run(program, kernel=BEFORE_6_12) == {"in the new folder": []}


def test_a_folder_that_is_there_can_be_renamed(place: Place) -> None:
    """By the ranks' `os.rename` also where the overlay itself cannot: in a user namespace."""
    found = place.run("""
        from autoddp.worker.process.isolated import _rename_folders_by_copying
        _rename_folders_by_copying()
        os.rename("folder", "other")
        os.makedirs("empty")
        os.replace("other", "empty")
        os.mkdir("full")
        open("full/x", "w").close()
        try:
            os.rename("a,b:c", "full")
        except OSError as error:
            found["onto a full folder"] = type(error).__name__
        found["names"] = sorted(os.listdir("."))
        found["a"] = open("empty/inner/a").read()
        """)
    assert found == {
        "onto a full folder": "OSError",
        "names": ["a,b:c", "ck.pt", "empty", "full", "hard.pt"],
        "a": "a",
    }


def test_a_file_can_be_moved_between_two_folders_of_one_disk(place: Place) -> None:
    """An ordinary user has an overlay for each folder below /, so the kernel cannot rename from one to another."""
    found = place.run("""
        from autoddp.worker.process.isolated import _rename_folders_by_copying
        _rename_folders_by_copying()
        made = "/tmp/autoddp-overlay-test"
        open(made, "w").write("new")
        os.replace(made, "ck.pt")
        found["ck.pt"] = open("ck.pt").read()
        os.symlink("ck.pt", made)
        os.rename(made, "latest")
        found["latest"] = os.readlink("latest")
        open(made, "w").close()
        try:
            os.replace(made, "folder")
        except OSError as error:
            found["onto a folder"] = type(error).__name__
        found["names"], found["left"] = sorted(os.listdir(".")), os.path.exists(made)
        """)
    assert found == {
        "ck.pt": "new",
        "latest": "ck.pt",
        "onto a folder": "IsADirectoryError",
        "names": ["a,b:c", "ck.pt", "folder", "hard.pt", "latest"],
        "left": True,
    }


def test_two_names_of_one_file_stay_one_file_where_the_kernel_can(place: Place) -> None:
    found = place.run("""
        with open("ck.pt", "r+") as file:
            file.write("NEW")
        found["by its other name"] = open("hard.pt").read()
        """)
    assert place.user is not None or found["by its other name"] == "NEW"


@pytest.mark.parametrize("syncs", [False, True])
def test_syncing_waits_for_the_disk_only_where_it_is_asked_for(place: Place, syncs: bool) -> None:
    program = """
    with open("/proc/self/mounts") as file:
        found["options"] = [line.split()[3] for line in file if line.split()[2] == "overlay"]
    """
    options = place.run(program, syncs=syncs)["options"]
    assert isinstance(options, list)
    assert options
    assert ("volatile" in options[0]) is not syncs


def test_sockets_lead_to_those_outside_and_pipes_to_nobody(place: Place) -> None:
    """What goes through a pipe is real, and its reader takes the end of the attempt for the end of the job."""
    os.mkfifo(place.work / "pipe")
    os.chmod(place.work / "pipe", 0o666)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place.base / "s"))
        os.chmod(place.base / "s", 0o777)
        if place.user is not None:
            os.chown(place.base / "s", place.user, place.user)
        server.listen()
        before = (place.base / "s").stat()
        reader = os.open(place.work / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        found = place.run("""
            import socket
            client = socket.socket(socket.AF_UNIX)
            client.connect(base + "/s")
            client.sendall(b"by socket")
            for change in (lambda: os.chmod(base + "/s", 0o600), lambda: os.utime(base + "/s", (0, 0))):
                try:
                    change()
                except OSError as error:
                    found.setdefault("changed", []).append(error.strerror)
            try:
                os.open("pipe", os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                found["pipe"] = error.strerror
            os.mkfifo("own")
            ends = os.open("own", os.O_RDONLY | os.O_NONBLOCK), os.open("own", os.O_WRONLY)
            os.write(ends[1], b"by pipe")
            found["own"] = os.read(ends[0], 100).decode()
            """)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(100) == b"by socket"
        assert found == {"changed": [os.strerror(errno.EROFS)] * 2, "pipe": os.strerror(errno.ENXIO), "own": "by pipe"}
        after = (place.base / "s").stat()
        assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)
        os.close(reader)


def test_a_socket_in_a_real_folder_stays_where_all_is_removed(place: Place) -> None:
    """The launcher's, which lies in the temporary folder: a script may empty that at its start."""
    path = place.base / "real" / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        if place.user is not None:
            os.chown(path, place.user, place.user)
        server.listen()
        found = place.run("""
            import shutil, socket
            shutil.rmtree(base + "/real", ignore_errors=True)
            os.system(f"rm -rf {base}/real/* 2>/dev/null")
            client = socket.socket(socket.AF_UNIX)
            client.connect(base + "/real/s")
            client.sendall(b"still there")
            """)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(100) == b"still there"
        assert (found, path.is_socket()) == ({}, True)


def test_a_pipe_is_known_by_its_age(place: Place) -> None:
    os.mkfifo(place.work / "pipe")
    found = place.run("""
        import time
        from autoddp.isolation.pipes import Pipes
        began = time.time()
        time.sleep(0.05)  # the kernel's clock of files is coarse
        os.mkfifo("own")
        os.symlink("pipe", "link")
        os.utime("own", (0, 0))
        pipes = Pipes(began)
        found["others"] = [name for name in ("pipe", "link", "own", "ck.pt", "absent") if pipes.are_others(name)]
        """)
    assert found["others"] == ["pipe", "link"]


def test_queues_and_segments_of_system_v_are_its_own(place: Place) -> None:
    """Native code reaches them without any file: a number or a name of the user's would lead to his other programs."""
    libc = ctypes.CDLL(None, use_errno=True)
    key = 0x61640000 + os.getpid() % 0x8000
    queue, name = libc.msgget(key, 0o1666), f"/autoddp-{os.getpid()}".encode()
    assert queue >= 0
    try:
        found = place.run(f"""
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            found["the user's"] = libc.msgget({key}, 0)
            found["removed by its number"] = libc.msgctl({queue}, 0, None)
            makes = (libc.msgget, ()), (libc.shmget, (4096,)), (libc.semget, (1,))
            found["made"] = [make({key}, *size, 0o1600) for make, size in makes]
            found["posix"] = libc.mq_open({name!r}, os.O_CREAT | os.O_RDWR, 0o600, None)
            """)
        assert (found["the user's"], found["removed by its number"]) == (-1, -1)
        assert min(found["made"]) >= 0
        assert found["posix"] >= 0
        assert libc.msgget(key, 0) == queue
        assert libc.shmget(key, 0, 0) == libc.semget(key, 0, 0) == -1
        assert libc.mq_unlink(name) == -1
    finally:  # -1 is no number of any of them
        libc.msgctl(libc.msgget(key, 0), 0, None)
        libc.shmctl(libc.shmget(key, 0, 0), 0, None)
        libc.semctl(libc.semget(key, 0, 0), 0, 0)


def test_a_rank_may_do_to_its_parent_what_it_may_without_the_overlay(place: Place) -> None:
    found = place.run("""
        import subprocess, textwrap
        child = '''
        import os, resource
        parent = os.getppid()
        os.sched_setaffinity(parent, os.sched_getaffinity(0))
        os.setpriority(os.PRIO_PROCESS, parent, os.getpriority(os.PRIO_PROCESS, parent) + 1)
        resource.prlimit(parent, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
        print(os.readlink(f"/proc/{parent}/cwd"), end="")
        '''
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(child)], capture_output=True, text=True)
        found["said"] = done.stdout + done.stderr
        """)
    assert found == {"said": str(place.work)}


def test_a_copy_in_memory_has_a_limit(place: Place) -> None:
    """A data set in /dev/shm is copied where it is opened to be changed: two of them may be more than the memory."""
    setup = "mount -t tmpfs -o size=64m,mode=1777 none /dev/shm && head -c 20M /dev/zero > /dev/shm/data"
    program = """
        with open("/dev/shm/other", "wb") as file:
            file.write(b"x" * 2**20)
        try:
            open("/dev/shm/data", "r+b").close()
        except OSError as error:
            found["error"] = error.errno
        found["read"] = len(open("/dev/shm/data", "rb").read())
        """
    owner = place.user or 0
    found = place.run(program, f"{setup} && chown {owner}:{owner} /dev/shm/data", MEMORY=str(8 << 20))
    assert found == {"error": errno.ENOSPC, "read": 20 << 20}


def test_shared_memory_that_is_no_mount_is_covered_too(place: Place) -> None:
    """In a chroot, to which /dev was given without what is mounted below it, /dev/shm is a folder of devtmpfs."""
    path = f"/dev/shm/{place.base.name}"
    devices = "mount --bind /dev /dev && mkdir -p /dev/shm"
    owner = place.user or 0
    program = f"""
        with open({path!r}, "a") as file:
            file.write("more")
        found["there"] = open({path!r}).read()
        """
    try:
        found = place.run(program, f"{devices} && printf old > {path} && chown {owner}:{owner} {path}")
    finally:
        kept = in_namespace(f"{devices} && cat {path} && rm {path}")
    assert found == {"there": "oldmore"}
    assert kept == "old"


def test_message_queues_of_others_cannot_be_removed_by_their_paths(place: Place) -> None:
    """As in /dev/mqueue."""
    folder = place.base / "queues"
    folder.mkdir()
    queue, owner = folder / place.base.name, place.user or 0
    program = f"""
        with contextlib.suppress(FileNotFoundError):
            os.remove({str(queue)!r})
        found["there"] = os.listdir({str(folder)!r})
        """
    try:
        setup = f"mount -t mqueue none {folder} && touch {queue} && chown {owner}:{owner} {queue}"
        found = place.run("import contextlib\n" + textwrap.dedent(program), setup)
    finally:
        kept = in_namespace(f"mount -t mqueue none {folder} && ls {folder} && rm -f {queue}")
    assert found == {"there": []}
    assert place.base.name in kept.split()


def test_what_is_mounted_below_is_covered_too(place: Place) -> None:
    """A file system of its own, one that is read-only, and a file that is a mount point."""
    inner = place.base / "moun\u00a0ted \r"  # of these the kernel's list escapes the blank alone
    inner.mkdir()
    other = place.base / "one"
    other.write_text("one")
    os.chmod(other, 0o666)
    protected = place.base / "protected"
    protected.write_text("protected")
    os.chmod(protected, 0o444)
    if place.user is not None:
        os.chown(inner, place.user, place.user)
        os.chown(protected, place.user, place.user)
    setup = (
        f"mount -t tmpfs -o mode=777 none '{inner}' && (cd '{inner}' && echo kept > kept && mkdir deep && "
        f"chmod 777 deep && mount -t tmpfs -o mode=777 none deep && echo deep > deep/d) && "
        f"cp {other} {place.base}/source && chmod 666 {place.base}/source && mount --bind {place.base}/source {other}"
    )
    program = f"""
        inner = {str(inner)!r}
        try:
            os.remove(inner + "/deep/d")
        except OSError as error:
            found["removed"] = error.errno
        open("{other}", "w").write("changed")
        try:
            os.chmod("{protected}", 0o644)
            open("{protected}", "w").write("changed")
        except OSError as error:
            found["protected"] = error.errno
        found["deep"] = os.listdir(inner + "/deep")
        found["in"] = sorted(os.listdir(inner))
        try:
            open(inner + "/new", "w").write("new")
            found["written"] = True
        except OSError as error:
            found["written"] = error.errno
        """
    found = place.run(program, setup)
    if place.user is None:
        assert found["deep"] == []
    else:
        assert found["removed"] == 30
    assert found["in"] == ["deep", "kept"]
    assert (place.base / "source").read_text() == "one"
    # an ordinary user's new root is put together of such files, each a mount of its own
    assert found.get("protected") == (None if place.user is None else errno.EROFS)
    assert (protected.read_text(), protected.stat().st_mode & 0o777) == ("protected", 0o444)
    # no overlay of an ordinary user's lies over a folder with mounts below it: there it is read-only
    assert found["written"] is True or (place.user is not None and found["written"] == 30)


def test_what_other_programs_remove_meanwhile_is_left_out(place: Place) -> None:
    """As temporary files beside a folder that has mounts, and so is rebuilt entry by entry for an ordinary user."""
    inner = place.base / "mounted"
    inner.mkdir()
    program = """
        found["names"] = sorted(name for name in os.listdir(base) if name.startswith(("gone", "mounted")))
        found["in"] = os.listdir(f"{base}/mounted")
        """
    setup = f"mount -t tmpfs -o mode=777 none {inner} && echo kept > {inner}/kept"
    found = place.run(program, setup, kernel=ENTRIES_THAT_GO)
    assert found == {"names": ["mounted"], "in": ["kept"]}


def test_a_mount_is_seen_under_a_locale_that_is_not_utf_8(place: Place) -> None:
    """Else it is not covered: below a folder that is bound for an ordinary user, what is written there is real."""
    inner = place.base / "moun\u00e9ted"
    inner.mkdir()
    if place.user is not None:
        os.chown(inner, place.user, place.user)
    setup = f"mount -t tmpfs -o mode=777 none '{inner}' && echo kept > '{inner}/kept'"
    program = """
        name = next(name for name in os.listdir(base) if name.startswith("moun"))
        found["in"] = os.listdir(f"{base}/{name}")
        """
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert place.run(program, setup, **ascii_alone) == {"in": ["kept"]}


def test_a_shared_folder_that_is_a_link_stays_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /var/lock, and /var/tmp where it leads to a larger disk: an empty folder in its place hides data."""
    (place.work / "shared").symlink_to("folder/inner")
    shared = f"overlay._SHARED = ({str(place.work / 'shared')!r},)"
    monkeypatch.setitem(globals(), "ENTER", f"\nimport autoddp.isolation.overlay as overlay\n{shared}{ENTER}")
    assert place.run('found["in it"] = os.listdir("shared")') == {"in it": ["a"]}


def test_devices_in_a_folder_of_dev_can_be_opened(place: Place) -> None:
    """As /dev/infiniband and /dev/dri in a container, whose /dev is no file system of the kernel's."""
    made = subprocess.run(["mknod", str(place.base / "zero"), "c", "1", "5"], capture_output=True)
    if made.returncode != 0:
        pytest.skip("this user may make no devices")
    setup = (
        "mount -t tmpfs -o mode=755 none /dev && mkdir /dev/shm /dev/some /dev/some/deep && "
        "mount -t tmpfs -o mode=1777 none /dev/shm && mknod -m 666 /dev/null c 1 3 && "
        "mknod -m 666 /dev/some/zero c 1 5 && mknod -m 666 /dev/some/deep/zero c 1 5 && "
        "mkfifo -m 666 /dev/some/pipe && exec 9<>/dev/some/pipe"  # so it has a reader
    )
    program = """
        try:
            os.open("/dev/some/pipe", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            found["a pipe of others"] = error.strerror
        for name in ("null", "some/zero", "some/deep/zero"):
            with open(f"/dev/{name}", "r+b", buffering=0) as device:
                found[name] = len(device.read(1))
        """
    nobody = os.strerror(errno.ENXIO)
    assert place.run(program, setup) == {"null": 0, "some/zero": 1, "some/deep/zero": 1, "a pipe of others": nobody}


def test_settings_of_the_machine_cannot_be_changed(place: Place) -> None:
    """By no program, in whatever language; a Python of an attempt is ended before it tries."""
    setup = "{ mount -t binfmt_misc none /proc/sys/fs/binfmt_misc || true; }"
    program = """
        settings = ("/proc/sys/vm/swappiness", "/proc/sys/fs/binfmt_misc/register", "/proc/sysrq-trigger")
        groups = [path for path, _, _ in os.walk("/sys/fs/cgroup")][:50]
        for path in (*settings, "/sys/kernel/mm", "/sys/module", "/sys", *groups):
            if os.path.exists(path):
                found[path] = os.access(path, os.W_OK)
        found["of itself"] = os.access("/proc/self/oom_score_adj", os.W_OK)
        found["groups"] = sorted(os.listdir("/sys/fs/cgroup"))
        """
    found = place.run(program, setup)
    assert found.pop("groups") == sorted(os.listdir("/sys/fs/cgroup"))
    assert [path for path, writable in found.items() if writable] == ["of itself"], found


def test_networks_of_the_machine_cannot_be_changed(place: Place) -> None:
    """Neither by the process itself, nor by a program of root's that it starts."""
    found = place.run("""
        import errno, fcntl, struct, subprocess, sys
        code = (
            "import fcntl, socket, struct\\n"
            "asks, sets = 0x8921, 0x8922\\n"  # SIOCGIFMTU, SIOCSIFMTU
            "with socket.socket() as one:\\n"
            "    now = fcntl.ioctl(one, asks, struct.pack('16si20x', b'lo', 0))\\n"
            "    fcntl.ioctl(one, sets, now)\\n"
        )
        try:
            exec(code)
        except PermissionError:
            found["itself"] = "refused"
        done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        found["program"] = done.stderr.splitlines()[-1:]
        """)
    assert found == {"itself": "refused", "program": ["PermissionError: [Errno 1] Operation not permitted"]}


def test_a_file_in_shared_memory_that_goes_meanwhile_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs, such as the loaders of another job, make and remove files there all the time."""
    monkeypatch.setattr(os, "walk", lambda path: iter([(path, [], ["torch_1_2_3_gone"])]))
    assert not _has_devices("/dev/shm")


@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="needs FUSE")
def test_a_mount_whose_server_has_ended_costs_nothing(place: Place) -> None:
    """As an sshfs, an s3fs or a gvfs that has crashed: "Transport endpoint is not connected"."""
    dead = place.base / "dead"
    dead.mkdir()
    if place.user is not None:
        os.chown(dead, place.user, place.user)
    mounts = (
        'import ctypes, os, sys; device = os.open("/dev/fuse", os.O_RDWR); '
        'data = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode(); '
        'sys.exit(ctypes.CDLL(None).mount(b"dead", os.fsencode(sys.argv[1]), b"fuse", ctypes.c_ulong(0), data))'
    )
    program = f"""
        found["in it"] = os.listdir({str(dead)!r})
        open("new", "w").write("new")
        """
    assert place.run(program, f"{sys.executable} -c '{mounts}' {dead}") == {"in it": []}


def test_what_is_mounted_in_a_writable_folder_of_a_read_only_root_is_seen(place: Place) -> None:
    """As in a container that is started with a read-only root, a volume at the work folder and data below it."""
    if place.user is not None:
        pytest.skip("an ordinary user cannot overlay a work folder with mounts below it")
    data = place.work / "data"
    (data / "deep").mkdir(parents=True)
    setup = (
        f"mount --bind {place.base} {place.base} && mount -t tmpfs none {data} && echo one > {data}/x && "
        f"mkdir {data}/deep && mount -t tmpfs none {data}/deep && echo two > {data}/deep/y && "
        f"mount -o remount,ro {data} && mount -o remount,bind,ro /"
    )
    program = """
        found["data"] = [open("data/x").read(), open("data/deep/y").read()]
        found["refused"] = []
        for name in ("data/new", "/new"):
            try:
                open(name, "w")
            except OSError as error:
                found["refused"].append(error.errno)
        open("data/deep/y", "w").write("changed")
        open("new", "w").write("new")
        found["names"] = sorted(os.listdir("."))
        """
    found = place.run(program, setup)
    assert found["data"] == ["one\n", "two\n"]
    assert found["refused"] == [30, 30]
    assert {"new", "data"} < set(found["names"])  # type: ignore[call-overload]


def test_a_folder_that_the_script_needs_and_that_cannot_be_covered_refuses_the_whole(place: Place) -> None:
    if place.user is None:
        pytest.skip("root can cover it")
    program = (
        "import sys\ntry:\n"
        + textwrap.indent(ENTER, "    ")
        + ("except Exception as error:\n    print(type(error).__name__, error)")
    )
    shell = (
        f"mkdir -p {place.work}/data && mount -t tmpfs none {place.work}/data && "
        + " && ".join(_readable_interpreter() or ["true"])
        + f' && cd {place.work} && exec "$@"'
    )
    who = ["setpriv", f"--reuid={place.user}", f"--regid={place.user}", "--clear-groups"]
    command = ["unshare", "-m", "--propagation", "private", "bash", "-c", shell, "test", *who, sys.executable]
    env = environment(HOME=str(place.base), PYTHONPATH=str(ROOT))
    done = subprocess.run([*command, "-c", program, str(place.base)], env=env, capture_output=True, text=True)
    assert done.stdout.startswith("OverlayRefused the overlay cannot be mounted ("), done.stderr


def test_the_user_nobody_may_do_no_more_than_without_it(place: Place) -> None:
    """In a user namespace the folders of all others seem to be those of nobody, such as a script's user in a pod."""
    if place.user is None:
        pytest.skip("root may write everywhere")
    nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    own = place.work / "folder"
    os.chown(place.base, nobody, nobody)  # for the layers
    os.chown(own, nobody, nobody)
    found = Place(place.base, nobody).run("""
        for path in ("/", ".", "folder", base):
            found[path] = os.access(path, os.W_OK)
        """)
    assert found == {"/": False, ".": False, "folder": True, str(place.base): True}


def test_a_rename_that_a_class_keeps_is_the_one_that_copies(tmp_path: Path) -> None:
    """As in pathlib of Python 3.10, which may be imported before the isolation begins or after it."""
    program = """
        import os
        class Before:
            rename = os.rename
        from autoddp.worker.process.isolated import _rename_folders_by_copying
        _rename_folders_by_copying()
        class After:
            rename = os.rename
        os.mkdir("a")
        Before().rename("a", "b")
        After().rename("b", "c")
        assert os.listdir() == ["c"] and Before.rename is After.rename is os.rename
        """
    words = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(words, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_caches_are_there_for_the_next_attempt(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
        found["before"] = sorted(os.listdir("."))
        found["caches"] = [os.path.exists(path) for path in CACHES]
        for path in CACHES + OTHERS:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            open(path, "w").write("x")
        """
    caches = ["my_cache/deep/x", "pkg/__pycache__/m.pyc", f"{place.base}/.cache/hub/x", "cache-0123.arrow"]
    caches += [f"{place.base}/named/x"]
    others = ["folder/out.pt", "last.ckpt", f"{place.base}/elsewhere.txt"]
    program = f"CACHES, OTHERS = {caches!r}, {others!r}\n" + textwrap.dedent(program)
    first = place.run(program)
    monkeypatch.setenv("HOME", str(place.base))
    layers = Layers(str(place.base / "layers" / "0"), str(place.base / "layers" / "kept"))
    keep_caches(layers, {"HF_HOME": str(place.base / "named")}, [str(place.work)])
    with contextlib.suppress(OSError):
        subprocess.run(["chmod", "-R", "u+rwX", layers.scratch], check=False)
        shutil.rmtree(layers.scratch)
    if place.user is not None:  # as the keeper, which runs as the user, would have made them
        subprocess.run(["chown", "-R", f"{place.user}:{place.user}", place.base / "layers"], check=True)
    second = place.run(program)
    assert first["caches"] == [False] * 5
    assert second["caches"] == [True] * 5
    assert second["before"] == sorted([*first["before"], "cache-0123.arrow", "my_cache", "pkg"])  # type: ignore[misc]


def test_the_shares_that_a_desktop_has_mounted_are_covered() -> None:
    line = "36 35 0:52 / /run/user/0/gvfs rw,nosuid,nodev - fuse.gvfsd-fuse gvfsd-fuse rw,user_id=0"
    assert parse(line).is_writable


def test_the_kernels_limit_of_namespaces_is_named() -> None:
    """In a user namespace of its own a process may lower that limit. The kernel then says "No space left on device"."""
    lower = 'for kind in user mnt; do echo 0 > /proc/sys/user/max_${kind}_namespaces; done; exec "$@"'
    enter = "from autoddp.isolation.overlay import Layers, enter; enter(Layers('/nowhere', '/nowhere'), [], [])"
    words = ["unshare", "-Ur", "sh", "-c", lower, "sh", sys.executable, "-c", enter]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    limits = "/proc/sys/user/max_user_namespaces is 0, /proc/sys/user/max_mnt_namespaces is 0"
    why = f"this host does not allow a mount namespace (no more of them are allowed: {limits})"
    assert done.stderr.splitlines()[-1].endswith(f"OverlayRefused: {why}")


def test_the_mount_of_a_path_is_the_nearest_one_and_may_be_none() -> None:
    """In a chroot to a folder / is no mount: the search for it never ended."""
    root, data = Mount(1, "/", "ext4", False), Mount(2, "/data", "xfs", False)
    assert mount_of("/data/set/1", {"/": root, "/data": data}) is data
    assert mount_of("/database", {"/": root, "/data": data}) is root
    assert mount_of("/database", {"/data": data}) is None


def test_locks_of_other_programs_count(place: Place) -> None:
    """As under torchrun, a script waits for the job that holds a lock, or ends beside it."""
    files = [place.work / name for name in ("busy.lock", "a,b:c/x", "folder/inner/a")]
    shutil.copy(files[1], files[0])
    os.chown(files[0], place.user or 0, place.user or 0)
    with contextlib.ExitStack() as stack:
        held, part, shared = (stack.enter_context(path.open("r+")) for path in files)
        fcntl.flock(held, fcntl.LOCK_EX)
        # one of the open file: that of a process goes as soon as it closes the file, which `run` compares
        fcntl.fcntl(part, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        fcntl.flock(shared, fcntl.LOCK_SH)
        found = place.run("""
            import fcntl, signal
            from autoddp.isolation.locks import beneath_the_overlay, watch_locks
            watch_locks(beneath_the_overlay)
            def asked(path, operation, lock=fcntl.flock, *part, mode="a"):
                with open(path, mode) as file:
                    try:
                        lock(file, operation, *part)
                        return "has it"
                    except OSError as error:
                        return type(error).__name__
            def ends(*_):
                raise TimeoutError
            NOW = fcntl.LOCK_NB
            found["of another"] = asked("busy.lock", fcntl.LOCK_EX | NOW)
            found["read"] = asked("busy.lock", fcntl.LOCK_SH | NOW, mode="r")
            found["first byte"] = asked("a,b:c/x", fcntl.LOCK_EX | NOW, fcntl.lockf, 1)
            found["second byte"] = asked("a,b:c/x", fcntl.LOCK_EX | NOW, fcntl.lockf, 1, 1)
            found["other kind"] = asked("a,b:c/x", fcntl.LOCK_EX | NOW)
            found["shared"] = asked("folder/inner/a", fcntl.LOCK_SH | NOW)
            found["alone"] = asked("folder/inner/a", fcntl.LOCK_EX | NOW)
            found["own"] = [asked("new.lock", fcntl.LOCK_EX), asked("new.lock", fcntl.LOCK_EX)]
            with open(base + "/real/lock", "w") as file:  # no overlay covers it: the kernel knows whose its locks are
                fcntl.flock(file, fcntl.LOCK_SH | NOW)
                fcntl.flock(file, fcntl.LOCK_EX | NOW)
            signal.signal(signal.SIGALRM, ends)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            found["waits"] = asked("busy.lock", fcntl.LOCK_EX)
            signal.setitimer(signal.ITIMER_REAL, 0)
        """)
    assert found == {
        **dict.fromkeys(("of another", "read", "first byte", "alone"), "BlockingIOError"),
        **dict.fromkeys(("second byte", "other kind", "shared"), "has it"),
        "own": ["has it", "has it"],
        "waits": "TimeoutError",
    }
