"""Linux system calls that Python 3.10 does not have. Each raises OSError, with its name or a path as the file name."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_PR_CAPBSET_DROP = 24
_CAPABILITIES_VERSION = 0x20080522
_CAP_NET_ADMIN = 12
_RLIMIT_CORE = 4
_AT_FDCWD, _STATX_BTIME, _SIZE_OF_STATX, _BTIME_AT = -100, 0x800, 256, 80
_MEMFD_CREATE, _MFD_CLOEXEC = {"x86_64": 319, "aarch64": 279}, 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203, "riscv64": 41, "s390x": 217}

_libc = ctypes.CDLL(None, use_errno=True)


def enter_mount_namespace() -> bool:
    """Give this process, which must have one thread, a mount namespace. Returns whether that took a user namespace."""
    try:
        _check(_libc.unshare(_CLONE_NEWNS), "unshare")
        return False
    except PermissionError:
        pass
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    return True


def enter_ipc_namespace() -> None:
    """Give this process queues, semaphores and shared memory of System V, and queues of POSIX, that no other sees.

    The kernel removes them with the last process that has them. This needs the right to enter a mount namespace.
    """
    _check(_libc.unshare(_CLONE_NEWIPC), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Call mount(2)."""
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(data))
    _check(_libc.mount(*arguments), target)


def pivot_into(root: str) -> None:
    """Make the mount point `root` this process's root folder and detach the old one. The working folder is then /."""
    os.chdir(root)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(38, "pivot_root has no known number on this processor")
    # With "." twice the old root is mounted on top of the new one, so that no folder is needed for it.
    call("pivot_root", number, b".", b".")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def die_with_parent(signal_number: int, parent: int) -> None:
    """The kernel sends this process that signal when the thread that made it ends.

    `parent`: the process id of its parent. Where that has ended before this call, the process sends it itself.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def adopt_orphans() -> None:
    """Descendants whose parent has ended become children of this process, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def give_up_new_privileges() -> None:
    """Programs that this process starts from now on gain nothing by a set-user-ID bit."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def give_up_capabilities() -> None:
    """Be an ordinary process of its user again, after the mounts: a user namespace gives all rights within it.

    A process that has a right more than the one that asks cannot be looked at in /proc, nor be given other CPUs.
    """
    header, nothing = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, nothing), "capset")
    _prctl(_PR_SET_DUMPABLE, 1)


def give_up_network_settings() -> None:
    """Give up the right to change addresses, routes, rates and filters of networks, also for what is started later."""
    _prctl(_PR_CAPBSET_DROP, _CAP_NET_ADMIN)  # else the next program of root's would have the right again
    header, rights = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capget(header, rights), "capget")
    for number in range(3):  # the effective, permitted and inheritable rights of the lower 32
        rights[number] &= ~(1 << _CAP_NET_ADMIN)
    _check(_libc.capset(header, rights), "capset")


def leave_no_core_files() -> None:
    """Write no core file where a signal ends this process, or one that it starts from now on.

    Not by the module `resource`: a file of that name beside the script could be imported in its place.
    """
    limits = (ctypes.c_ulong * 2)()  # the present one, and the most that it may be set to
    _check(_libc.getrlimit(_RLIMIT_CORE, limits), "getrlimit")
    limits[0] = 0
    _check(_libc.setrlimit(_RLIMIT_CORE, limits), "setrlimit")


def birth_time(path: bytes) -> float | None:
    """When what is at `path` was made, in seconds since 1970; None where the file system or the kernel cannot tell."""
    result = ctypes.create_string_buffer(_SIZE_OF_STATX)
    if not hasattr(_libc, "statx") or _libc.statx(_AT_FDCWD, path, 0, _STATX_BTIME, result) != 0:
        return None
    (known,) = struct.unpack_from("=I", result)
    if not known & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", result, _BTIME_AT)
    return float(seconds + nanoseconds / 1e9)


def open_nameless(mark: str) -> int:
    """A descriptor of an empty file in memory that /proc shows as "/memfd:MARK (deleted)"; closed by exec.

    Not by `os.memfd_create`, which a Python that was compiled for an old libc does not have, such as those of conda and
    uv.
    """
    number = _MEMFD_CREATE.get(platform.machine())
    if number is None:
        raise OSError(38, "memfd_create has no known number on this processor")
    return call("memfd_create", number, mark.encode(), ctypes.c_uint(_MFD_CLOEXEC))


def call(name: str, number: int, *arguments: object) -> int:
    """A system call by its number, for which libc has no function."""
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), name)


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))), "prctl")


def _check(result: int, subject: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), subject)
    return result
