"""Corners in which a real file could be reached, or the script could see something that is not so."""

from __future__ import annotations

from pathlib import Path

import pytest
from guarded import plant, run, snapshot

CASES = {
    "hard links": """
        os.link("model.pt", "also"); open("also", "a").write("!")
        assert open("model.pt").read() == "old model!" and open("hard.pt").read() == "old model"
        assert os.path.samefile("also", "model.pt")""",
    "symlink that leads out": """
        open("outside/far.txt", "w").write("near"); os.rename("outside/far.txt", "outside/x")
        assert os.listdir("../elsewhere") == ["x"]
        os.symlink("../elsewhere", "way"); open("way/y", "w")
        assert os.path.realpath("way/y").endswith("/elsewhere/y")""",
    "a lock that another program holds": """
        import fcntl, subprocess
        holds = "import fcntl; f = open('log.txt', 'r+'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
        other = subprocess.Popen([sys.executable, "-c", holds], stdin=-1, stdout=-1)
        other.stdout.readline()
        with open("log.txt", "a") as file:
            try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError: pass
            else: raise AssertionError
            other.communicate(b"\\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        with open("new.lock", "w") as file: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)""",
    "own descriptor by /proc": """
        fd = os.open("model.pt", os.O_RDONLY)
        open(f"/proc/self/fd/{fd}", "w").write("x"); open(f"/dev/fd/{fd}", "a").write("y")
        assert open("model.pt").read() == "xy"
        os.chmod(f"/proc/self/fd/{fd}", 0); os.utime(fd); os.fchmod(fd, 0o600)
        os.truncate(f"/proc/self/cwd/log.txt", 0); os.remove("/proc/self/cwd/tool.sh")
        os.rename(f"/proc/self/root{os.getcwd()}/hard.pt", "x"); assert not os.path.exists("hard.pt")""",
    "link into a writable folder": """
        import errno
        os.symlink(os.path.abspath("model.pt"), f"{shared}/link")
        open(f"{shared}/link", "w").write("x")
        assert open("model.pt").read() == "x"
        try: os.link("hard.pt", f"{shared}/hard")
        except OSError as error: assert error.errno == errno.EXDEV
        else: raise AssertionError
        os.remove(f"{shared}/link")
        shutil.copy("hard.pt", f"{shared}/copied")
        shutil.move(f"{shared}/copied", "hard.pt")
        assert open("hard.pt").read() == "old model\" and os.listdir(shared) == []""",
    "replace over a folder": """
        for target, number in (("ckpt", 39), ("model.pt", 20)):
            try: os.replace("empty", target)
            except OSError as error: assert error.errno == number, error
            else: raise AssertionError
        os.rename("ckpt/step-1", "empty"); assert os.listdir("empty") == ["model.bin"]
        assert not os.path.exists("ckpt/latest") and os.path.lexists("ckpt/latest")""",
    "folder made anew": """
        shutil.rmtree("ckpt"); os.mkdir("ckpt"); assert os.listdir("ckpt") == []
        os.makedirs("ckpt/step-1"); assert os.listdir("ckpt/step-1") == []
        os.rename("ckpt", "moved"); assert not os.path.exists("ckpt"); os.mkdir("ckpt")
        assert os.listdir("ckpt") == []""",
    "real folder renamed": """
        os.rename("ckpt", "old"); open("old/latest/new", "w")
        assert sorted(os.listdir("old/step-1")) == ["model.bin", "new"]
        os.rename("old", "older"); os.mkdir("ckpt"); assert os.listdir("ckpt") == []
        assert open("older/latest/model.bin").read() == "weights" * 100
        shutil.rmtree("older"); assert not os.path.exists("older")""",
    "working directory removed": """
        os.chdir("empty"); os.rmdir("../empty")
        for action in (os.getcwd, os.listdir, lambda: open("x", "w")):
            try: action()
            except FileNotFoundError: pass
            else: raise AssertionError
        os.chdir(tree); os.mkdir("empty"); os.chdir("empty"); assert os.getcwd() == f"{tree}/empty" """,
    "working directory renamed": """
        os.chdir("ckpt/step-1"); os.rename("../../ckpt", "../../c"); assert os.getcwd() == f"{tree}/c/step-1"
        assert os.listdir() == ["model.bin"] and open("model.bin").read(7) == "weights"; open("x", "w")
        assert sorted(os.listdir(f"{tree}/c/step-1")) == ["model.bin", "x"]""",
    "folder of the script by chdir": """
        os.makedirs("outputs/1"); os.chdir("outputs/1"); open("x", "w").write("x"); os.chdir("..")
        assert os.listdir() == ["1"] and open("1/x").read() == "x" and open("../log.txt").read() == "line 1\\n"
        os.chdir("../ckpt"); assert os.getcwd() == f"{tree}/ckpt" """,
    "descriptors of folders": """
        fd = os.open("ckpt", os.O_RDONLY | os.O_DIRECTORY)
        f = os.open("x", os.O_WRONLY | os.O_CREAT, dir_fd=fd); os.close(f)
        assert sorted(os.listdir(fd)) == ["latest", "step-1", "x"] and os.stat("x", dir_fd=fd).st_size == 0
        os.rename("step-1", "s", src_dir_fd=fd, dst_dir_fd=fd); os.unlink("latest", dir_fd=fd)
        os.mkdir("m", dir_fd=fd)
        os.symlink("s", "l", dir_fd=fd); assert os.readlink("l", dir_fd=fd) == "s"; os.chmod("x", 0o600, dir_fd=fd)
        assert sorted(e.name for e in os.scandir(fd)) == ["l", "m", "s", "x"]
        assert [sorted(d) for _, d, _, _ in os.fwalk("ckpt")][0] == ["l", "m", "s"]; os.fchdir(fd)
        assert os.path.isdir("s")""",
    "files without a name": """
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR); os.write(fd, b"x")
        import tempfile; f = tempfile.TemporaryFile(dir="."); f.write(b"x")""",
    "extended attributes": """
        try: os.setxattr("model.pt", "user.x", b"1")
        except OSError as error: assert error.errno == 95
        else:
            assert os.getxattr("model.pt", "user.x") == b"1" and os.listxattr("hard.pt") == []
            os.removexattr("model.pt", "user.x"); os.setxattr(os.open("hard.pt", 0), "user.y", b"1")""",
    "pipes": """
        os.mkfifo("fifo"); import threading
        t = threading.Thread(target=lambda: open("fifo", "w").write("through")); t.start()
        assert open("fifo").read() == "through"; t.join(); os.remove("fifo")""",
    "same errors": """
        import errno
        for action, number in ((lambda: open("no/x"), 2), (lambda: os.mkdir("ckpt"), 17),
            (lambda: os.rmdir("ckpt"), 39),
            (lambda: os.listdir("model.pt"), 20), (lambda: open("ckpt", "w"), 21), (lambda: os.rename("no", "x"), 2),
            (lambda: open("model.pt/x", "w"), 20), (lambda: os.stat("x" * 300), 36),
            (lambda: os.readlink("model.pt"), 22)):
            try: action()
            except OSError as error: assert error.errno == number, error
            else: raise AssertionError
        for bad, kind in ((1.5, TypeError), ("a\\0b", ValueError), (None, TypeError)):
            for function in (os.stat, open, os.mkdir, os.remove):
                try: function(bad)
                except kind: pass
                else: raise AssertionError((bad, function))""",
    "functions as values": """
        import pickle, inspect, io
        assert pickle.loads(pickle.dumps(os.stat)) is os.stat and callable(open)
        assert repr(os.stat).startswith("<built-in")
        class Holder: opened = open; status = os.stat
        Holder().opened("log.txt").close(); Holder().status("log.txt"); inspect.signature(os.stat)
        assert isinstance(open("log.txt", "rb", buffering=0), io.FileIO)
        assert isinstance(io.FileIO("log.txt"), io.RawIOBase)
        assert open("log.txt").name == "log.txt" and os.stat in os.supports_dir_fd
        io.FileIO("model.pt", "w").write(b"x")
        io.open("log.txt", "a", opener=lambda p, f: os.open(p, f)).write("x")""",
    "a big file renamed is not copied": """
        os.rename("ckpt/step-1/model.bin", "best"); os.replace("best", "model.pt")
        assert os.path.getsize("model.pt") == 700""",
    "files that Python's own C code opens": """
        import importlib.util, ssl
        ssl.create_default_context().keylog_filename = "keys.txt"
        context = ssl.create_default_context(); context.keylog_filename = "model.pt"
        assert os.path.exists("keys.txt") and context.keylog_filename == os.path.abspath("model.pt")
        if importlib.util.find_spec("readline"):
            import readline
            os.environ["HOME"] = tree
            readline.add_history("typed"); readline.write_history_file(); readline.write_history_file("log.txt")
            readline.append_history_file(1, "log.txt"); readline.read_history_file("log.txt")
            assert os.path.exists(".history") and open("log.txt").read().count("typed") == 2""",
    "another process is in the middle of a change": """
        from autoddp.isolation.guard.lock import ChangeLock
        for action in (lambda: open("log.txt").read(), lambda: open("x", "w").close(), lambda: os.remove("model.pt")):
            ChangeLock(scratch).begin_change(); action()  # as if it had died there
        assert sorted(os.listdir())[-1] == "x" and not os.path.exists("model.pt")""",
    "a folder above the run's own is emptied and removed": """
        assert os.path.basename(shared) not in os.listdir("..")
        shutil.rmtree(os.path.dirname(shared))
        assert not os.path.exists(tree) and os.listdir(shared) == []
        open(f"{shared}/x", "w").write("x"); os.mkdir(f"{shared}/d"); os.replace(f"{shared}/x", f"{shared}/d/x")
        assert open(f"{shared}/d/x").read() == "x" and os.path.isdir(shared)
        os.makedirs(tree); shutil.rmtree(f"{shared}/d"); assert os.listdir(shared) == []""",
    "names of the overlay's own": """
        os.mkdir("mine"); assert os.listdir("mine") == []; shutil.rmtree("ckpt"); os.mkdir("ckpt")
        assert os.listdir("ckpt") == [] and [*os.scandir("ckpt")] == []
        assert not os.path.exists("ckpt/.autoddp-beneath")""",
}


@pytest.mark.parametrize("name", CASES)
def test_corner(tmp_path: Path, name: str) -> None:
    import textwrap

    tree = tmp_path / "tree"
    plant(tree)
    before, elsewhere = snapshot(tree), snapshot(tmp_path / "elsewhere")
    shared = tmp_path / "shared"  # a folder that the guard leaves alone
    shared.mkdir()
    start = f"import shutil; tree, scratch, shared = {str(tree)!r}, {str(tmp_path / 'scratch')!r}, {str(shared)!r}\n"
    ended, said = run(start + textwrap.dedent(CASES[name]), tree, tmp_path / "scratch", writable=(str(shared),))
    assert snapshot(tree) == before
    assert snapshot(tmp_path / "elsewhere") == elsewhere
    assert (ended, said) == (0, "")
    if name == "a big file renamed is not copied":
        assert not any(path.is_file() and path.stat().st_size > 100 for path in (tmp_path / "scratch").rglob("*"))
