"""pathlib's verbs, folders, and paths that are relative to somewhere."""

import os
import shutil
from pathlib import Path

from traces.trace import both, files, only, trace


@trace(prepare=files("notes.txt", "data.bin"), after=only("data.bin", "notes.txt"))
def pathlib_write(folder, rank, step):
    """Path.write_text, write_bytes and open."""
    (folder / "notes.txt").write_text(f"step {step}\n")
    (folder / "data.bin").write_bytes(bytes(100))
    with (folder / "notes.txt").open("a") as file:
        file.write("more\n")
    assert (folder / "notes.txt").read_text() == f"step {step}\nmore\n"


@trace(prepare=files("a.txt", "b.txt", "c.txt"), after=only("a.txt", "b.txt", "c.txt"))
def pathlib_unlink(folder, rank, step):
    """Path.unlink, one name at each step."""
    path = folder / f"{'abc'[step % 3]}.txt"
    path.unlink()
    assert not path.exists()
    assert path.name not in [found.name for found in folder.iterdir()]


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"), where="relative")
def pathlib_rename(folder, rank, step):
    """Path.rename and Path.replace, there and over another one."""
    (folder / "a.txt").rename(folder / "c.txt")
    (folder / "c.txt").replace(folder / "b.txt")
    (folder / "a.txt").write_text(f"new at {step}\n")


@trace(prepare=files("a.txt"), after=only("a.txt"))
def pathlib_touch(folder, rank, step):
    """Path.touch of an old and of a new name."""
    (folder / "a.txt").touch()
    (folder / f"flag{step}").touch()


def _empty(folder: Path) -> None:
    (folder / "empty").mkdir()


@trace(prepare=both(_empty, files("full/a.txt")), after=only("empty", "full"))
def pathlib_folders(folder, rank, step):
    """Path.mkdir and Path.rmdir."""
    if (folder / "empty").exists():
        (folder / "empty").rmdir()
    (folder / f"new{step}" / "deep").mkdir(parents=True)
    (folder / f"new{step}" / "deep").rmdir()


@trace(prepare=files("a.txt"), after=only("a.txt"))
def pathlib_links(folder, rank, step):
    """Path.symlink_to and Path.hardlink_to, then written through."""
    (folder / f"soft{step}").symlink_to("a.txt")
    (folder / f"hard{step}").hardlink_to(folder / "a.txt")
    (folder / f"soft{step}").write_text("by the soft link\n")
    with (folder / f"hard{step}").open("r+") as file:
        file.write("BY the hard link\n")


@trace(prepare=files("a.txt"), after=only("a.txt"))
def pathlib_chmod(folder, rank, step):
    """Path.chmod."""
    (folder / "a.txt").chmod(0o600 + 0o11 * (step % 2))


@trace(prepare=files("run/old.txt", "log.txt"), after=only("log.txt", "run"), where="relative")
def change_folder(folder, rank, step):
    """os.chdir, then names without a folder."""
    home = os.getcwd()
    os.chdir(folder)
    assert os.path.basename(os.getcwd()) == folder.name
    try:
        with open("log.txt", "w") as file:
            file.write(f"step {step}\n")
        if os.path.exists("run/old.txt"):
            os.remove("run/old.txt")
        os.chdir("run")
        Path("new.txt").write_text("new\n")
        os.rename("../log.txt", f"log{step}.txt")
        Path("../log.txt").write_text("again\n")
    finally:
        os.chdir(home)


@trace(prepare=files("a.txt"), after=only("a.txt"))
def change_folder_by_descriptor(folder, rank, step):
    """os.fchdir to a folder that was opened, and back to the one that was left."""
    here, there = os.open(".", os.O_RDONLY), os.open(folder, os.O_RDONLY)
    try:
        os.fchdir(there)
        Path("a.txt").write_text(f"step {step}\n")
    finally:
        os.fchdir(here)
        os.close(here)
        os.close(there)


@trace(prepare=files("run/a.txt", "run/b.txt"), after=only("run"), where="inside")
def remove_tree_relative(folder, rank, step):
    """shutil.rmtree of a relative path."""
    shutil.rmtree("run", ignore_errors=True)
    assert not os.path.exists("run")
    os.makedirs("run/new", exist_ok=True)


@trace(prepare=files("a/b/c/file.txt"), after=only("a"))
def rename_with_folders(folder, rank, step):
    """os.renames and os.removedirs, which make and remove folders on the way."""
    if step == 0:
        os.renames(folder / "a/b/c/file.txt", folder / "x/y/file.txt")
        assert not (folder / "a").exists()
    os.makedirs(folder / "p/q", exist_ok=True)
    os.removedirs(folder / "p/q")
    (folder / "keep").touch()  # or the trace's own folder would go with the last one


@trace(prepare=files("run/a.txt", "run/deep/b.txt"), after=only("run"))
def rename_a_folder(folder, rank, step):
    """os.rename of a folder with something in it, and back under another name's content."""
    os.rename(folder / "run", folder / "aside")
    os.makedirs(folder / "run")
    (folder / "run" / "a.txt").write_text(f"step {step}\n")
    assert (folder / "aside").is_dir()
    shutil.rmtree(folder / "aside")


@trace(prepare=files("a.txt", "b.txt", "deep/c.txt"), after=only("a.txt", "b.txt", "deep"))
def clean_by_walking(folder, rank, step):
    """os.walk and os.scandir: all that is found is removed."""
    for root, folders, names in os.walk(folder, topdown=False):
        for name in names:
            os.unlink(os.path.join(root, name))
        for name in folders:
            os.rmdir(os.path.join(root, name))
    assert list(os.scandir(folder)) == []
    (folder / f"fresh{step}.txt").write_text("fresh\n")


@trace(prepare=files("a.txt"), after=only("a.txt"), where="inside")
def dotted_and_strange_names(folder, rank, step):
    """Names with spaces, dots, quotes, line ends, other letters; bytes as names; `..` in the middle."""
    for name in ("with space", "-dash", "quo'te\"", "line\nend", "überß", ".hidden", "a" * 200):
        Path(name).write_text("x")
    with open(b"by bytes \xff", "wb") as file:
        file.write(b"x")
    with open(f"../{folder.resolve().name}/./a.txt", "w") as file:
        file.write(f"step {step}\n")


def _linked_folder(folder: Path) -> None:
    files("real/a.txt")(folder)
    os.symlink("real", folder / "link")
    os.symlink(folder.resolve() / "real", folder / "absolute")


@trace(prepare=_linked_folder, after=only("absolute", "link", "real"))
def through_linked_folders(folder, rank, step):
    """Writes and removals through links to folders."""
    (folder / "link" / "a.txt").write_text(f"step {step}\n")
    (folder / "absolute" / f"b{step}.txt").write_text("new\n")
    os.remove(folder / "absolute" / "a.txt")
    (folder / "link" / "a.txt").write_text("again\n")
