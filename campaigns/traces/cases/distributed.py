"""Files that ranks share: distributed checkpoints, locks, a store in a file."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from traces.trace import EVERY, files, only, trace


def _weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((64,), value), "bias": torch.full((8,), value)}


def _distributed(folder: Path) -> None:
    """A checkpoint of the user's earlier job, saved by one process."""
    dcp.save(_weights(3.0), checkpoint_id=folder / "ck", no_dist=True)


def _distributed_is_users(folder: Path) -> None:
    found = _weights(0.0)
    dcp.load(found, checkpoint_id=folder / "ck", no_dist=True)
    assert (found["weight"] == 3).all(), f"the checkpoint has {found['weight'][:3]}"


@trace(prepare=_distributed, after=_distributed_is_users, ranks=EVERY)
def dcp_save_over(folder, rank, step):
    """torch.distributed.checkpoint.save over the old one."""
    dcp.save(_weights(100.0 + step), checkpoint_id=folder / "ck")
    found = _weights(0.0)
    dcp.load(found, checkpoint_id=folder / "ck")
    assert (found["weight"] == 100 + step).all()


@trace(prepare=_distributed, after=_distributed_is_users, ranks=EVERY)
def dcp_remove_then_save(folder, rank, step):
    """Rank 0 removes the old distributed checkpoint, then all save."""
    if rank == 0:
        shutil.rmtree(folder / "ck")
    dist.barrier()
    dcp.save(_weights(100.0 + step), checkpoint_id=str(folder / "ck"))


@trace(prepare=_distributed, after=_distributed_is_users, ranks=EVERY)
def dcp_asynchronous(folder, rank, step):
    """async_save: a thread writes while the script goes on."""
    dcp.async_save(_weights(100.0 + step), checkpoint_id=folder / "ck").result()


@trace(prepare=_distributed, after=_distributed_is_users, ranks=EVERY)
def dcp_with_a_writer(folder, rank, step):
    """FileSystemWriter, one file per rank, two threads."""
    writer = dcp.FileSystemWriter(folder / "ck", single_file_per_rank=False, thread_count=2)
    dcp.save(_weights(100.0 + step), storage_writer=writer)


@trace(prepare=files("lock", "count.txt"), after=only("count.txt", "lock"), ranks=EVERY)
def lock_by_flock(folder, rank, step):
    """fcntl.flock around a file that all ranks change."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(folder / "count.txt", "a") as file:
            file.write(f"{rank}\n")
        fcntl.flock(lock, fcntl.LOCK_UN)


@trace(prepare=files("count.txt"), after=only("count.txt"), ranks=EVERY)
def lock_by_name(folder, rank, step):
    """O_EXCL: the rank that makes the lock file does the work, the others see that it is there."""
    dist.barrier()
    winner = False
    with contextlib.suppress(FileExistsError):
        os.close(os.open(folder / f"lock{step}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        winner = True
        (folder / "count.txt").write_text(f"by rank {rank}\n")
    won = torch.tensor([float(winner)])
    dist.all_reduce(won)
    assert won.item() == 1, f"{won.item()} ranks made the same lock file: they do not see one another's files"
    if winner:
        os.unlink(folder / f"lock{step}")


@trace(after=only(), ranks=EVERY)
def lock_of_a_package(folder, rank, step):
    """filelock, as datasets, transformers and hubs use it."""
    with contextlib.suppress(ImportError):
        from filelock import FileLock

        with FileLock(folder / "data.lock"):
            (folder / f"by_rank{rank}").touch()
    (folder / f"step{step}").touch()


@trace(after=only(), ranks=EVERY)
def store_in_a_file(folder, rank, step):
    """torch.distributed.FileStore: the ranks meet in a file, which C++ writes and locks."""
    store = dist.FileStore(str(folder / f"store{step}"), dist.get_world_size())
    store.set(f"rank{rank}", "here")
    for other in range(dist.get_world_size()):
        assert store.get(f"rank{other}") == b"here"
    dist.barrier()
    (folder / f"met{rank}").touch()


@trace(prepare=files("done/rank9"), after=only("done"), ranks=EVERY)
def folders_made_by_all(folder, rank, step):
    """All ranks make the same folder (exist_ok) and a file each in it; the first then lists and removes them."""
    os.makedirs(folder / "done", exist_ok=True)
    (folder / "done" / f"rank{rank}").write_text("done")
    dist.barrier()
    if rank == 0:
        assert {"rank0", "rank1"} <= set(os.listdir(folder / "done"))
        shutil.rmtree(folder / "done")
    dist.barrier()
    assert not (folder / "done").exists()
