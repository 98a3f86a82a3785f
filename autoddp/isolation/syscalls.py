"""The Linux system calls behind a mount namespace, which Python 3.10 does not have. Each raises OSError."""

from __future__ import annotations

import ctypes
import os
import platform

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203, "riscv64": 41, "s390x": 217}

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Give this process, which must have one thread, namespaces of its own."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """As mount(2)."""
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(data))
    _check(_libc.mount(*arguments), target)


def unmount(target: str, flags: int = 0) -> None:
    """As umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), target)


def pivot_into(root: str) -> None:
    """Make the mount point `root` this process's root folder and detach the old one. The working folder is then /."""
    os.chdir(root)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(38, "pivot_root has no known number on this processor")
    # With "." twice the old root is mounted on top of the new one, so that no folder is needed for it.
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    unmount(".", MNT_DETACH)
    os.chdir("/")


def die_with_parent(signal_number: int) -> None:
    """The kernel sends this process that signal when the thread that made it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Descendants whose parent has ended become children of this process, so that it can end them."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0), "prctl")


def _check(result: int, subject: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), subject)
