"""Checkpoints: written over, kept in number, copied, linked, swapped."""

import contextlib
import glob
import io
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch

from traces.trace import EVERY, both, checkpoint, is_users, only, state, text, trace


@trace(prepare=checkpoint("model.pt"), after=is_users("model.pt"))
def save_over(folder, rank, step):
    """torch.save over the old checkpoint."""
    torch.save(state(step), folder / "model.pt")
    assert torch.load(folder / "model.pt")["epoch"] == 100 + step


@trace(prepare=checkpoint("model.pt"), after=is_users("model.pt"))
def save_into_an_open_file(folder, rank, step):
    """torch.save into a file that the script opened."""
    with open(folder / "model.pt", "wb") as file:
        torch.save(state(step), file)


@trace(prepare=checkpoint("model.pt"), after=is_users("model.pt"))
def save_in_the_old_format(folder, rank, step):
    """torch.save without zip."""
    torch.save(state(step), str(folder / "model.pt"), _use_new_zipfile_serialization=False)


@trace(prepare=checkpoint("model.pt"), after=is_users("model.pt"))
def save_through_a_buffer(folder, rank, step):
    """torch.save into memory, the bytes then into the file."""
    buffer = io.BytesIO()
    torch.save(state(step), buffer)
    (folder / "model.pt").write_bytes(buffer.getbuffer())


@trace(prepare=checkpoint("rank0.pt", "rank1.pt"), after=is_users("rank0.pt", "rank1.pt"), ranks=EVERY)
def save_by_rank(folder, rank, step):
    """Each rank has a checkpoint of its own."""
    torch.save(state(step), folder / f"rank{rank}.pt")


@trace(prepare=checkpoint("ck.pt"), after=is_users("ck.pt"), where="inside")
def remove_then_save(folder, rank, step):
    """os.remove, then torch.save under the same name."""
    if os.path.exists("ck.pt"):
        os.remove("ck.pt")
    assert not os.path.exists("ck.pt")
    torch.save(state(step), "ck.pt")


@trace(prepare=checkpoint("last.pt", "last.pt.bak"), after=is_users("last.pt", "last.pt.bak"))
def backup_by_replace(folder, rank, step):
    """The old one becomes the backup by os.replace, then a new one is written."""
    os.replace(folder / "last.pt", folder / "last.pt.bak")
    torch.save(state(step), folder / "last.pt")
    if step:
        assert torch.load(folder / "last.pt.bak")["epoch"] == 99 + step


@trace(prepare=checkpoint("run/a.pt", "run/deep/b.pt"), after=is_users("run/a.pt", "run/deep/b.pt"))
def remove_tree_and_recreate(folder, rank, step):
    """shutil.rmtree of the run's folder, which is then made anew."""
    shutil.rmtree(folder / "run")
    os.makedirs(folder / "run" / "deep")
    assert os.listdir(folder / "run") == ["deep"]
    torch.save(state(step), folder / "run" / "deep" / "b.pt")


@trace(prepare=checkpoint("step_1.pt", "step_2.pt"), after=only("step_1.pt", "step_2.pt"))
def rotate_by_glob_and_time(folder, rank, step):
    """Keep two: glob, sorted by getmtime, the oldest are removed."""
    torch.save(state(step), folder / f"step_{100 + step}.pt")
    found = sorted(glob.glob(str(folder / "step_*.pt")), key=os.path.getmtime)
    for old in found[:-2]:
        os.remove(old)
    assert len(list(folder.glob("step_*.pt"))) == 2


@trace(prepare=checkpoint("1/model.pt", "2/model.pt"), after=is_users("1/model.pt", "2/model.pt"))
def rotate_folders(folder, rank, step):
    """Keep two folders: those with the lowest numbers are removed whole."""
    torch.save(state(step), _made(folder / str(100 + step)) / "model.pt")
    for old in sorted(os.listdir(folder), key=int)[:-2]:
        shutil.rmtree(folder / old)
    assert len(os.listdir(folder)) == 2


@trace(prepare=checkpoint("last.pt", "best.pt"), after=is_users("best.pt"))
def copy_last_to_best(folder, rank, step):
    """shutil.copy, copyfile and copy2 of the last one to the best one."""
    torch.save(state(step), folder / "last.pt")
    (shutil.copy, shutil.copyfile, shutil.copy2)[step % 3](folder / "last.pt", folder / "best.pt")
    assert torch.load(folder / "best.pt")["epoch"] == 100 + step


@trace(prepare=checkpoint("now/model.pt", "best/model.pt"), after=is_users("best/model.pt"))
def copy_tree_over(folder, rank, step):
    """shutil.copytree over a folder that is there."""
    torch.save(state(step), folder / "now" / "model.pt")
    shutil.copytree(folder / "now", folder / "best", dirs_exist_ok=True)


@trace(prepare=checkpoint("last.pt", "archive/last.pt"), after=is_users("last.pt", "archive/last.pt"))
def move_into_archive(folder, rank, step):
    """shutil.move of a file over another one in a folder."""
    shutil.move(folder / "last.pt", folder / "archive" / "last.pt")
    torch.save(state(step), folder / "last.pt")


@trace(prepare=checkpoint("run/model.pt"), after=is_users("run/model.pt"), where="relative")
def move_a_folder(folder, rank, step):
    """The whole folder of the earlier run is moved aside."""
    shutil.move(str(folder / "run"), str(folder / f"run.old{step}"))
    torch.save(state(step), _made(folder / "run") / "model.pt")


def _latest(folder: Path) -> None:
    checkpoint("epoch3.pt")(folder)
    os.symlink("epoch3.pt", folder / "latest.pt")


@trace(prepare=_latest, after=is_users("latest.pt"))
def latest_link_removed_and_made(folder, rank, step):
    """The link "latest" is removed and made again."""
    torch.save(state(step), folder / f"epoch{100 + step}.pt")
    os.unlink(folder / "latest.pt")
    os.symlink(f"epoch{100 + step}.pt", folder / "latest.pt")
    assert os.readlink(folder / "latest.pt") == f"epoch{100 + step}.pt"


@trace(prepare=_latest, after=is_users("latest.pt"))
def latest_link_swapped(folder, rank, step):
    """The link "latest" is swapped in one step, by a rename."""
    torch.save(state(step), folder / f"epoch{100 + step}.pt")
    os.symlink(f"epoch{100 + step}.pt", folder / "latest.tmp")
    os.replace(folder / "latest.tmp", folder / "latest.pt")
    assert torch.load(folder / "latest.pt")["epoch"] == 100 + step


@trace(prepare=_latest, after=is_users("epoch3.pt", "latest.pt"))
def save_through_a_link(folder, rank, step):
    """torch.save to a symbolic link writes what it points to."""
    torch.save(state(step), folder / "latest.pt")


def _linked(folder: Path) -> None:
    checkpoint("epoch3.pt")(folder)
    os.link(folder / "epoch3.pt", folder / "best.pt")


@trace(prepare=_linked, after=is_users("best.pt", "epoch3.pt"))
def hard_link_swapped(folder, rank, step):
    """The best one is a hard link, removed and made again."""
    torch.save(state(step), folder / f"epoch{100 + step}.pt")
    os.remove(folder / "best.pt")
    os.link(folder / f"epoch{100 + step}.pt", folder / "best.pt")


@trace(prepare=_linked, after=is_users("best.pt", "epoch3.pt"))
def write_through_a_hard_link(folder, rank, step):
    """Writing one name of a file with two."""
    with open(folder / "best.pt", "r+b") as file:
        file.seek(10)
        file.write(b"overwritten")


@trace(prepare=checkpoint("last.pt"), after=is_users("last.pt"))
def open_file_then_replace(folder, rank, step):
    """A file is held open for writing while another one takes its name; then it is written."""
    with open(folder / "last.pt", "r+b") as old:
        torch.save(state(step), folder / "new.pt")
        os.replace(folder / "new.pt", folder / "last.pt")
        old.write(b"to the file without a name")
    assert torch.load(folder / "last.pt")["epoch"] == 100 + step


@trace(prepare=checkpoint("last.pt"), after=both(is_users("last.pt"), only("last.pt")))
def write_aside_sync_rename(folder, rank, step):
    """A temporary file beside it, fsync, rename, fsync of the folder."""
    handle, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        torch.save(state(step), file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(name, folder / "last.pt")
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(handle)
    os.close(handle)


@trace(prepare=checkpoint("last.pt"), after=is_users("last.pt"))
def named_temporary_then_move(folder, rank, step):
    """tempfile.NamedTemporaryFile in the system's folder, moved over the old one from another file system."""
    with tempfile.NamedTemporaryFile(delete=False) as file:
        torch.save(state(step), file)
    shutil.move(file.name, folder / "last.pt")


@trace(prepare=checkpoint("best.pt"), after=is_users("best.pt"))
def best_by_a_metric_file(folder, rank, step):
    """What is best is read from a JSON file, which the script writes too."""
    record = folder / "best.json"
    best = json.loads(record.read_text())["loss"] if record.exists() else float("inf")
    if 1 / (step + 1) < best:
        torch.save(state(step), folder / "best.pt")
        record.write_text(json.dumps({"loss": 1 / (step + 1)}))


def _fresh(folder: Path) -> None:
    assert not (folder / "snapshot.pt").exists(), "the job would resume from what tuning wrote and train nothing"


@trace(after=_fresh)
def snapshot_in_a_fresh_folder(folder, rank, step):
    """Resume if there is a snapshot: one of a tuning run would make the job train nothing."""
    torch.save({"owner": "job", "epoch": 1_000_000}, folder / "snapshot.pt")


@trace(prepare=checkpoint("snapshot.pt"), after=is_users("snapshot.pt"), where="inside")
def snapshot_goes_on(folder, rank, step):
    """Read the snapshot, go on from its epoch, write it."""
    found = torch.load("snapshot.pt")
    assert found["epoch"] == 3 + step
    torch.save({**found, "owner": "job", "epoch": found["epoch"] + 1}, "snapshot.pt")


@trace(prepare=checkpoint("snapshot.pt"), after=is_users("snapshot.pt"), ranks=EVERY)
def first_writes_all_read(folder, rank, step):
    """Rank 0 writes, all others wait until it is there and read it: they share what they see."""
    import torch.distributed as dist

    if rank == 0:
        torch.save(state(step), folder / "snapshot.pt")
        (folder / f"done{step}").mkdir()
    dist.barrier()
    assert (folder / f"done{step}").is_dir()
    assert torch.load(folder / "snapshot.pt")["epoch"] == 100 + step
    dist.barrier()


@trace(prepare=checkpoint("rank0.pt", "rank1.pt"), after=is_users("rank0.pt", "rank1.pt"), ranks=EVERY)
def last_rank_removes_all(folder, rank, step):
    """Each rank writes, the last one removes those of all."""
    import torch.distributed as dist

    torch.save(state(step), folder / f"rank{rank}.pt")
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        for path in folder.glob("rank*.pt"):
            path.unlink()
    dist.barrier()
    assert not (folder / "rank0.pt").exists()


@trace(prepare=text(owner__txt="the user\n"), after=only("owner.txt"))
def many_small_files(folder, rank, step):
    """Hundreds of small files in nested folders, some removed at once."""
    for number in range(200):
        path = _made(folder / "samples" / str(number % 7)) / f"{number}.txt"
        path.write_text("sample")
        if number % 3 == 0:
            path.unlink()


@trace(prepare=checkpoint("keep.pt"), after=is_users("keep.pt"))
def remove_what_is_not_there(folder, rank, step):
    """Removals that fail, inside suppress: the errors must be the usual ones; then a real one."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(folder / "absent.pt")
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.mkdir(folder)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    (folder / "keep.pt").unlink(missing_ok=True)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
