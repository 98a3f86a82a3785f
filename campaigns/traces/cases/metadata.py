"""What is not content: modes, owners, times, attributes; names that are no files."""

import os
import socket
import stat
import tempfile
from pathlib import Path

from traces.trace import files, only, trace


@trace(prepare=files("a.txt", "run/b.txt"), after=only("a.txt", "run"))
def chmod_existing(folder, rank, step):
    """os.chmod of a file and a folder, os.fchmod of an open one."""
    os.chmod(folder / "a.txt", 0o444 + step)
    os.chmod(folder / "run", 0o711)
    handle = os.open(folder / "run" / "b.txt", os.O_RDONLY)
    os.fchmod(handle, 0o604)
    os.close(handle)
    assert stat.S_IMODE((folder / "a.txt").stat().st_mode) == 0o444 + step


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"), root=True)
def chown_existing(folder, rank, step):
    """os.chown and os.lchown to another user (root only)."""
    os.chown(folder / "a.txt", 1234, 1234)
    os.lchown(folder / "b.txt", 1234, -1)


@trace(prepare=files("a.txt", "b.txt", "run/c.txt"), after=only("a.txt", "b.txt", "run"))
def set_times(folder, rank, step):
    """os.utime of a file, an open one and a folder."""
    os.utime(folder / "a.txt")
    with open(folder / "b.txt") as file:
        os.utime(file.fileno(), ns=(10**18 + step, 10**18 + step))
    os.utime(folder / "run", (1, 1))


@trace(prepare=files("a.txt"), after=only("a.txt"))
def extended_attributes(folder, rank, step):
    """os.setxattr and removexattr; where the file system has none, the mode is changed."""
    try:
        os.setxattr(folder / "a.txt", "user.trained", f"step {step}".encode())
        os.setxattr(folder / "a.txt", "user.other", b"x")
        os.removexattr(folder / "a.txt", "user.other")
    except OSError:
        os.chmod(folder / "a.txt", 0o600)


@trace(prepare=files("a.txt"), after=only("a.txt"))
def copy_attributes(folder, rank, step):
    """shutil.copystat and copymode from one file to another."""
    import shutil

    (folder / f"new{step}").touch(mode=0o751)
    shutil.copystat(folder / f"new{step}", folder / "a.txt")


@trace(after=only())
def make_fifo(folder, rank, step):
    """os.mkfifo, through which something goes."""
    path = folder / f"pipe{step}"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    os.write(writer, b"through")
    assert os.read(reader, 7) == b"through"
    os.close(writer)
    os.close(reader)
    (folder / f"was{step}").touch()


@trace(after=only())
def make_node(folder, rank, step):
    """os.mknod of a plain file."""
    os.mknod(folder / f"node{step}", 0o600 | stat.S_IFREG)


@trace(after=only(), where="inside")
def unix_socket(folder, rank, step):
    """A socket with a name in the file system, by which something goes; its name stays."""
    name = f"s{step}"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(name)
        server.listen()
        client.connect(name)
        client.send(b"through")
        assert server.accept()[0].recv(7) == b"through"


@trace(prepare=files("a.txt"), after=only("a.txt"))
def with_another_umask(folder, rank, step):
    """os.umask, then new files and folders; and a file that may only be read is replaced."""
    old = os.umask(0o077)
    try:
        (folder / f"secret{step}").write_text("x")
        (folder / f"folder{step}").mkdir()
    finally:
        os.umask(old)
    assert stat.S_IMODE((folder / f"secret{step}").stat().st_mode) == 0o600
    (folder / "a.txt").chmod(0o400)
    handle, name = tempfile.mkstemp(dir=folder)
    os.close(handle)
    os.replace(name, folder / "a.txt")


def _sparse(folder: Path) -> None:
    with open(folder / "large.bin", "wb") as file:
        file.write(b"begin")
        file.truncate(64 * 2**20)


@trace(prepare=_sparse, after=only("large.bin"))
def change_a_large_file(folder, rank, step):
    """A few bytes of a file of 64 MiB, most of it a hole."""
    with open(folder / "large.bin", "r+b") as file:
        file.seek(1000 * (step + 1))
        file.write(b"changed")
