"""Landlock: the Linux kernel refuses this process and its children every write outside some folders.

    if supported():
        restrict_writes([run_folder, "/dev"])

It needs no privilege and cannot be taken back. What it does not cover: a file's mode, owner, times and extended
attributes. Files that are open already stay as writable as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import stat
import sys
from collections.abc import Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_NO_NEW_PRIVS = 38
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
# REMOVE_DIR, REMOVE_FILE and MAKE_CHAR to MAKE_SYM, in the kernel's order
_FOLDERS = sum(1 << bit for bit in range(4, 13))
_REFER = 1 << 13
# Before version 2 no file could be moved between two folders at all, not even between two writable ones.
_OLDEST = 2
_MACHINES = ("x86_64", "aarch64")


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"  # Python 3.14 wants it named; packed to one byte, both layouts are the same
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _call(number: int, *arguments: object) -> int:
    """A system call by its number; libc has no functions for these."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result


def _version() -> int:
    """The kernel's version of the interface; 0 where there is none."""
    if not sys.platform.startswith("linux") or platform.machine() not in _MACHINES:
        return 0
    try:
        return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError:  # built without it, switched off at boot, or refused by a container's profile
        return 0


def _rights(version: int) -> int:
    return _WRITE_FILE | _FOLDERS | _REFER | (_TRUNCATE if version >= 3 else 0)


def supported() -> bool:
    """Whether the kernel has it and lets this process use it."""
    version = _version()
    if version < _OLDEST:
        return False
    try:
        os.close(_ruleset(_rights(version)))
    except OSError:
        return False
    return True


def _ruleset(rights: int) -> int:
    attributes = _Ruleset(rights)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    return _call(_CREATE_RULESET, ctypes.byref(attributes), size, ctypes.c_uint32(0))


def restrict_writes(writable: Sequence[str]) -> None:
    """From now on this process, its threads started later and its children write below these folders and files only.

    A path that does not exist is left out. OSError if the kernel refuses; then nothing is restricted.
    """
    version = _version()
    if version < _OLDEST:
        raise OSError("Landlock: the kernel has no version of it that allows moving files between writable folders")
    rights = _rights(version)
    ruleset = _ruleset(rights)
    try:
        for path in writable:
            with contextlib.suppress(FileNotFoundError):
                _allow(ruleset, path, rights)
        # Without it an unprivileged process may not restrict itself; programs with the set-user-ID bit lose its effect.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_NO_NEW_PRIVS, ctypes.c_ulong(1), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
            raise OSError(ctypes.get_errno(), "prctl: no_new_privs")
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _WRITE_FILE | _TRUNCATE
        beneath = _Beneath(rights, descriptor)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(beneath), ctypes.c_uint32(0))
    finally:
        os.close(descriptor)
