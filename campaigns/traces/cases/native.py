"""Writers that are not Python: libc by ctypes, torch's C++, exports and profiles."""

import ctypes
import os
from pathlib import Path

import torch
from torch import nn

from traces.trace import checkpoint, files, is_users, only, trace


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result


@trace(prepare=files("a.txt", "b.txt", "c.txt"), after=only("a.txt", "b.txt", "c.txt"))
def libc_unlink_and_rename(folder, rank, step):
    """unlink and rename of libc, called by ctypes."""
    if step == 0:
        _checked(_libc().unlink(bytes(folder / "a.txt")), "unlink")
        _checked(_libc().rename(bytes(folder / "b.txt"), bytes(folder / "c.txt")), "rename")
        assert not (folder / "a.txt").exists()


@trace(prepare=files("a.txt"), after=only("a.txt"), where="inside")
def libc_open_and_write(folder, rank, step):
    """open, write and ftruncate of libc, called by ctypes, with a relative path."""
    libc = _libc()
    handle = _checked(libc.open(b"a.txt", os.O_WRONLY), "open")
    _checked(libc.ftruncate(handle, ctypes.c_long(20)), "ftruncate")
    _checked(libc.write(handle, b"libc", ctypes.c_size_t(4)), "write")
    libc.close(handle)


@trace(prepare=files("a.txt"), after=only("a.txt"))
def libc_system_and_fopen(folder, rank, step):
    """system and fopen of libc, called by ctypes."""
    libc = _libc()
    libc.fopen.restype = ctypes.c_void_p
    file = libc.fopen(bytes(folder / "a.txt"), b"a")
    if not file:
        raise OSError(ctypes.get_errno(), "fopen")
    libc.fputs(b"by fopen\n", ctypes.c_void_p(file))
    libc.fclose(ctypes.c_void_p(file))
    _checked(-libc.system(f"echo new > '{folder}/by_system'".encode()), "system")


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def system_call_exchange(folder, rank, step):
    """renameat2 by syscall(2): two names are exchanged, for which Python has no word."""
    number, at_cwd, exchange = 316, -100, 2  # x86-64; on others the two are renamed one after the other
    if os.uname().machine == "x86_64" and step == 0:
        call = _libc().syscall(number, at_cwd, bytes(folder / "a.txt"), at_cwd, bytes(folder / "b.txt"), exchange)
        _checked(call, "renameat2")
    elif step == 0:
        os.rename(folder / "a.txt", folder / "c.txt")
        os.rename(folder / "b.txt", folder / "a.txt")


class Doubles(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2


@trace(prepare=checkpoint("model.ts"), after=is_users("model.ts"))
def jit_save(folder, rank, step):
    """torch.jit.save over the old file: C++ writes it."""
    traced = torch.jit.trace(Doubles(), torch.ones(2))
    if step == 1:
        traced.save(str(folder / "model.ts"))
    else:
        torch.jit.save(traced, str(folder / "model.ts"))


@trace(prepare=checkpoint("archive.pt"), after=is_users("archive.pt"))
def file_writer_of_torch(folder, rank, step):
    """torch._C.PyTorchFileWriter, which torch.save uses itself."""
    writer = torch._C.PyTorchFileWriter(str(folder / "archive.pt"))
    writer.write_record("data", b"bytes", 5)
    writer.write_end_of_file()


@trace(prepare=files("model.pt2"), after=only("model.pt2"))
def export_save(folder, rank, step):
    """torch.export.save (only once: exporting takes a while)."""
    if step == 0:
        torch.export.save(torch.export.export(Doubles(), (torch.ones(2),)), folder / "model.pt2")


@trace(prepare=files("model.package"), after=only("model.package"))
def package(folder, rank, step):
    """torch.package."""
    from torch.package import PackageExporter

    with PackageExporter(folder / "model.package") as exporter:
        exporter.save_pickle("model", "weights.pkl", torch.ones(3))


@trace(prepare=files("profile.json"), after=only("profile.json"))
def profile(folder, rank, step):
    """torch.profiler's export: kineto, in C++, writes it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        torch.ones(10).sum()
    recorded.export_chrome_trace(str(folder / "profile.json"))


def _module(folder: Path) -> None:
    (folder / "plugin.py").write_text("VALUE = 1\n")


@trace(prepare=_module, after=only("plugin.py"))
def compiled_python(folder, rank, step):
    """py_compile writes a __pycache__ beside the user's module."""
    import py_compile

    py_compile.compile(str(folder / "plugin.py"))
