"""Places outside the working folder: /tmp, /dev/shm, $HOME, another folder."""

import os
import shutil
import tempfile
from multiprocessing import shared_memory
from pathlib import Path

from traces.trace import files, only, place, trace


def _in(kind: str):
    """Files of the user in another place."""

    def prepare(folder: Path) -> None:
        there = place(kind, folder)
        there.mkdir(parents=True)
        files("old.txt", "keep.txt")(there)

    return prepare


def _still_in(kind: str):
    def after(folder: Path) -> None:
        only("keep.txt", "old.txt")(place(kind, folder))

    return after


def _change(there: Path, step: int) -> None:
    """Write over, delete, add."""
    (there / "keep.txt").write_text(f"step {step}\n")
    (there / "old.txt").unlink(missing_ok=True)
    shutil.rmtree(there / "new", ignore_errors=True)
    (there / "new").mkdir()
    (there / "new" / "file").write_text("new\n")


@trace(prepare=_in("tmp"), after=_still_in("tmp"))
def in_tmp(folder, rank, step):
    """Files in /tmp."""
    _change(place("tmp", folder), step)


@trace(prepare=_in("shm"), after=_still_in("shm"))
def in_shared_memory_files(folder, rank, step):
    """Files in /dev/shm."""
    _change(place("shm", folder), step)


@trace(prepare=_in("home"), after=_still_in("home"))
def in_home(folder, rank, step):
    """Files in the home folder, found by expanduser."""
    _change(Path(os.path.expanduser("~")) / folder.resolve().name, step)


@trace(prepare=_in("elsewhere"), after=_still_in("elsewhere"))
def in_another_folder(folder, rank, step):
    """Files in a folder that is neither below the working folder nor at home."""
    _change(place("elsewhere", folder), step)


@trace(prepare=_in("elsewhere"), after=_still_in("elsewhere"))
def from_home_to_elsewhere(folder, rank, step):
    """A file is moved out of the working folder, another one linked from there."""
    (folder / "result.txt").write_text(f"step {step}\n")
    shutil.move(folder / "result.txt", place("elsewhere", folder) / "old.txt")
    link = folder / "linked"
    link.unlink(missing_ok=True)
    link.symlink_to(place("elsewhere", folder) / "old.txt")


@trace()
def temporary_folder_left(folder, rank, step):
    """tempfile.mkdtemp and mkstemp without cleaning up: nothing of it may stay."""
    made = tempfile.mkdtemp(prefix="temporary_folder_left.", dir=place("tmp", folder).parent)
    Path(made, "file").write_text("left\n")


@trace()
def shared_memory_left(folder, rank, step):
    """multiprocessing's shared memory, a name in /dev/shm, which the script forgets to unlink."""
    from multiprocessing import resource_tracker

    memory = shared_memory.SharedMemory(f"shared_memory_left.{os.getpid()}.{step}", create=True, size=100)
    resource_tracker.unregister(memory._name, "shared_memory")  # or Python itself would clean up
    memory.buf[0] = 1
    memory.close()


def _cache(folder: Path) -> None:
    there = place("home", folder) / "cache"
    there.mkdir(parents=True)
    (there / "index.txt").write_text("user\n")


def _cache_is_users(folder: Path) -> None:
    there = place("home", folder) / "cache"
    only("index.txt")(there)
    assert (there / "index.txt").read_text() == "user\n"


@trace(prepare=_cache, after=_cache_is_users)
def cache_built_once(folder, rank, step):
    """A data set is prepared on first use, into a temporary name, which is then renamed; its index grows."""
    there = place("home", folder) / "cache"
    if not (there / "dataset").exists():
        aside = Path(tempfile.mkdtemp(dir=there))
        (aside / "part0").write_bytes(bytes(1000))
        os.rename(aside, there / "dataset")
        with open(there / "index.txt", "a") as file:
            file.write("dataset\n")
    assert len((there / "dataset" / "part0").read_bytes()) == 1000
