"""Below Python's files: descriptors, flags, system calls."""

import fcntl
import io
import os
from pathlib import Path

from traces.trace import files, nothing, only, trace

_HELD: dict[str, int] = {}  # descriptors that stay open from one step to the next


@trace(prepare=files("a.txt"), after=only("a.txt"))
def open_flags(folder, rank, step):
    """os.open with O_TRUNC, O_APPEND, O_RDWR, O_CREAT, O_EXCL."""
    path = folder / "a.txt"
    for flags in (os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        handle = os.open(path, flags)
        if flags & os.O_ACCMODE:
            os.write(handle, b"by flags\n")
        os.close(handle)
    os.close(os.open(folder / f"new{step}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640))


@trace(prepare=files("a.txt", "b.txt", "c.txt"), after=only("a.txt", "b.txt", "c.txt"))
def relative_to_a_folder_handle(folder, rank, step):
    """dir_fd: open, rename, unlink, mkdir, symlink, link relative to an open folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        file = os.open("a.txt", os.O_WRONLY | os.O_TRUNC, dir_fd=handle)
        os.write(file, b"x" * (step + 1))
        os.close(file)
        if step == 0:
            os.unlink("b.txt", dir_fd=handle)
            os.rename("c.txt", "d.txt", src_dir_fd=handle, dst_dir_fd=handle)
        os.mkdir(f"made{step}", dir_fd=handle)
        os.symlink("a.txt", f"soft{step}", dir_fd=handle)
        os.link("a.txt", f"hard{step}", src_dir_fd=handle, dst_dir_fd=handle)
        os.utime("a.txt", (1, 1), dir_fd=handle)
        os.rmdir(f"made{step}", dir_fd=handle)
    finally:
        os.close(handle)


@trace(prepare=files("a.txt"), after=only("a.txt"))
def duplicate_and_shorten(folder, rank, step):
    """os.dup, os.dup2, fcntl's F_DUPFD, then ftruncate of the copy."""
    with open(folder / "a.txt", "r+b") as file:
        copy = os.dup(file.fileno())
        again = fcntl.fcntl(copy, fcntl.F_DUPFD, 50)
        os.ftruncate(again, 17)
        os.pwrite(copy, b"dup", 3)
        os.close(copy)
        os.close(again)
    assert (folder / "a.txt").stat().st_size == 17


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def truncate_by_name(folder, rank, step):
    """os.truncate by name, and a file's own truncate."""
    os.truncate(folder / "a.txt", 5 + step)
    with open(folder / "b.txt", "r+") as file:
        file.truncate(7)
    assert (folder / "a.txt").stat().st_size == 5 + step


@trace(prepare=files("a.txt"), after=only("a.txt"))
def held_open(folder, rank, step):
    """A descriptor that is opened once and written at each step."""
    if "log" not in _HELD:
        _HELD["log"] = os.open(folder / "a.txt", os.O_WRONLY | os.O_APPEND)
    os.write(_HELD["log"], f"step {step}\n".encode())
    os.fsync(_HELD["log"])


@trace(prepare=files("a.txt"), after=only("a.txt"))
def vectors_and_allocation(folder, rank, step):
    """writev, pwritev, posix_fallocate, lseek beyond the end."""
    handle = os.open(folder / "a.txt", os.O_RDWR)
    try:
        os.writev(handle, [b"one", b"two"])
        os.pwritev(handle, [b"three"], 100)
        os.posix_fallocate(handle, 0, 3000)
        os.lseek(handle, 5000, os.SEEK_SET)
        os.write(handle, b"far away")
    finally:
        os.close(handle)


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def copy_in_the_kernel(folder, rank, step):
    """sendfile and copy_file_range from one file into another."""
    with open(folder / "a.txt", "rb") as source, open(folder / "b.txt", "r+b") as target:
        os.sendfile(target.fileno(), source.fileno(), 0, 100)
        try:
            os.copy_file_range(source.fileno(), target.fileno(), 50, 0, 300)
        except OSError:  # some file systems have none
            os.pwrite(target.fileno(), b"copied", 300)


def _may_be_nameless(folder: Path) -> None:
    nothing(folder)


@trace(prepare=_may_be_nameless, after=only())
def file_without_a_name(folder, rank, step):
    """O_TMPFILE, to which a name is given when it is complete."""
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
        os.write(handle, b"complete")
        os.link(f"/proc/self/fd/{handle}", folder / f"named{step}", follow_symlinks=True)
        os.close(handle)
    except OSError:  # some file systems have none: write it under its name
        (folder / f"named{step}").write_bytes(b"complete")


@trace(prepare=files("a.txt"), after=only("a.txt"))
def by_the_proc_file_system(folder, rank, step):
    """A file that was opened to be read is opened again for writing, as /proc/self/fd/N."""
    with open(folder / "a.txt", "rb") as file, open(f"/proc/self/fd/{file.fileno()}", "r+b") as again:
        again.write(b"through /proc")


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def raw_and_buffered(folder, rank, step):
    """io.FileIO, io.open with buffering=0, os.fdopen, open with an opener, open of a descriptor."""
    with io.FileIO(str(folder / "a.txt"), "r+") as raw:
        raw.write(b"raw")
    with open(folder / "a.txt", "ab", buffering=0) as file:
        file.write(b"unbuffered")
    with open(folder / "b.txt", "w", opener=lambda path, flags: os.open(path, flags | os.O_APPEND)) as file:
        file.write("by the opener\n")
    with open(os.open(folder / "b.txt", os.O_WRONLY | os.O_APPEND), "w") as file:
        file.write(f"by the descriptor at {step}\n")
