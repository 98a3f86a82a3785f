"""Arrays: NumPy's files, memory maps, safetensors, HDF5, and what torch maps itself."""

import array
import mmap
from pathlib import Path

import numpy
import torch

from traces.trace import files, only, trace


@trace(prepare=files("data.bin"), after=only("data.bin"))
def memory_map(folder, rank, step):
    """mmap of a file that is open for reading and writing."""
    with open(folder / "data.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[5:9] = b"MAPS"
        mapped.flush()
    assert (folder / "data.bin").read_bytes()[5:9] == b"MAPS"


def _array(folder: Path) -> None:
    numpy.save(folder / "a.npy", numpy.full(100, 3.0))


def _array_is_users(folder: Path) -> None:
    assert (numpy.load(folder / "a.npy") == 3).all()


@trace(prepare=_array, after=_array_is_users)
def numpy_save(folder, rank, step):
    """numpy.save over the old array, savez and savetxt to new ones."""
    numpy.save(folder / "a.npy", numpy.full(100, float(step)))
    numpy.savez_compressed(folder / f"b{step}.npz", x=numpy.ones(10))
    numpy.savetxt(folder / f"c{step}.txt", numpy.ones(10))


@trace(prepare=_array, after=_array_is_users)
def numpy_map_in_place(folder, rank, step):
    """numpy.load with mmap_mode="r+": an assignment writes the file."""
    mapped = numpy.load(folder / "a.npy", mmap_mode="r+")
    mapped[:10] = 50 + step
    mapped.flush()


@trace(prepare=_array, after=_array_is_users)
def numpy_memmap(folder, rank, step):
    """numpy.memmap with mode "w+", and open_memmap over the old array."""
    made = numpy.memmap(folder / "made.dat", dtype="float32", mode="w+", shape=(64,))
    made[:] = step
    del made
    again = numpy.lib.format.open_memmap(folder / "a.npy", mode="w+", dtype="float64", shape=(100,))
    again[:] = 60 + step
    del again


@trace(prepare=files("raw.bin"), after=only("raw.bin"))
def array_to_file(folder, rank, step):
    """ndarray.tofile, by name and into an open file; array.array's too."""
    numpy.arange(50.0).tofile(folder / "raw.bin")
    with open(folder / "raw.bin", "ab") as file:
        numpy.arange(5.0).tofile(file)
        array.array("d", [1.0, 2.0]).tofile(file)


@trace(prepare=files("data.bin"), after=only("data.bin"))
def tensor_from_a_shared_file(folder, rank, step):
    """torch.from_file with shared=True: torch's C++ maps the file, an assignment writes it."""
    mapped = torch.from_file(str(folder / "data.bin"), shared=True, size=64, dtype=torch.uint8)
    mapped[:4] = 65 + step


@trace(after=only())
def tensor_makes_its_file(folder, rank, step):
    """torch.UntypedStorage.from_file of a file that is not there: torch's C++ makes it."""
    storage = torch.UntypedStorage.from_file(str(folder / f"store{step}"), shared=True, nbytes=256)
    storage.fill_(1)


def _safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.full((64,), 3.0)}, folder / "model.safetensors")


def _safetensors_are_users(folder: Path) -> None:
    from safetensors.torch import load_file

    assert (load_file(folder / "model.safetensors")["weight"] == 3).all()


@trace(prepare=_safetensors, after=_safetensors_are_users, modules=["safetensors"])
def safetensors_over(folder, rank, step):
    """safetensors.torch.save_file over the old file: Rust writes it."""
    from safetensors.torch import load_file, save_file

    save_file({"weight": torch.full((64,), float(step))}, folder / "model.safetensors")
    assert (load_file(folder / "model.safetensors")["weight"] == step).all()


@trace(prepare=_safetensors, after=_safetensors_are_users, modules=["safetensors"])
def safetensors_of_numpy(folder, rank, step):
    """safetensors.numpy.save_file, then the same over the old one by os.replace."""
    import os

    from safetensors.numpy import save_file

    save_file({"weight": numpy.full(64, float(step))}, folder / "new.safetensors")
    os.replace(folder / "new.safetensors", folder / "model.safetensors")


@trace(prepare=_safetensors, after=_safetensors_are_users, modules=["safetensors"])
def safetensors_as_bytes(folder, rank, step):
    """safetensors.torch.save makes bytes, Python writes them."""
    from safetensors.torch import save

    (folder / "model.safetensors").write_bytes(save({"weight": torch.full((64,), float(step))}))


def _hdf5(folder: Path) -> None:
    import h5py

    with h5py.File(folder / "data.h5", "w") as file:
        file["epoch"] = 3


def _hdf5_is_users(folder: Path) -> None:
    import h5py

    with h5py.File(folder / "data.h5", "r") as file:
        assert list(file) == ["epoch"]
        assert file["epoch"][()] == 3


@trace(prepare=_hdf5, after=_hdf5_is_users, modules=["h5py"])
def hdf5_append(folder, rank, step):
    """h5py with mode "a": HDF5's C library writes into the old file."""
    import h5py

    with h5py.File(folder / "data.h5", "a") as file:
        file["epoch"][()] = 100 + step
        file[f"step{step}"] = numpy.arange(10)


@trace(prepare=_hdf5, after=_hdf5_is_users, modules=["h5py"])
def hdf5_anew(folder, rank, step):
    """h5py with mode "w" over the old file."""
    import h5py

    with h5py.File(str(folder / "data.h5"), "w") as file:
        file["weights"] = numpy.full(10, step)
