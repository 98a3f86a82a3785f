"""Landlock: the Linux kernel refuses this process and its children every write outside some folders.

    if supported():
        restrict_writes([run_folder, "/dev"])

It needs no privilege and cannot be taken back. It does not cover a file's mode, owner, times and extended attributes,
and files that are open already stay writable.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import stat
import sys
from collections.abc import Sequence

from autoddp.isolation.kernel import syscalls

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
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


def _rights() -> int:
    """All rights to write that this kernel's Landlock can take away; 0 if it has none that is good enough."""
    if not sys.platform.startswith("linux") or platform.machine() not in _MACHINES:
        return 0
    try:
        version = _create_ruleset(None, 0, _VERSION)
    except OSError:  # built without it, switched off at boot, or refused by a container's profile
        return 0
    if version < _OLDEST:
        return 0
    return _WRITE_FILE | _FOLDERS | _REFER | (_TRUNCATE if version >= 3 else 0)


def _create_ruleset(attributes: object, size: int, flags: int) -> int:
    name = "landlock_create_ruleset"
    return syscalls.call(name, _CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint32(flags))


def _ruleset(rights: int) -> int:
    """The descriptor of a new set of rules, to which nothing is allowed yet."""
    attributes = _Ruleset(rights)
    return _create_ruleset(ctypes.byref(attributes), ctypes.sizeof(attributes), 0)


def supported() -> bool:
    """Whether the kernel has it and lets this process use it."""
    rights = _rights()
    if rights:
        with contextlib.suppress(OSError):
            os.close(_ruleset(rights))
            return True
    return False


def restrict_writes(writable: Sequence[str]) -> None:
    """From now on this process, its threads started later and its children write below these folders and files only.

    A path that does not exist is left out. OSError if the kernel refuses; then nothing is restricted.
    """
    rights = _rights()
    if not rights:
        raise OSError("Landlock: the kernel has no version of it that allows moving files between writable folders")
    ruleset = _ruleset(rights)
    try:
        for path in writable:
            with contextlib.suppress(FileNotFoundError):
                _allow(ruleset, path, rights)
        syscalls.give_up_new_privileges()  # without this an unprivileged process may not restrict itself
        syscalls.call("landlock_restrict_self", _RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _WRITE_FILE | _TRUNCATE
        rule = ctypes.byref(_Beneath(rights, descriptor))
        arguments = (ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        syscalls.call("landlock_add_rule", _ADD_RULE, *arguments)
    finally:
        os.close(descriptor)
