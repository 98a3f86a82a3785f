"""seccomp: the Linux kernel holds some system calls of this process and its children until another process answers.

    listener = hold_calls()          # in the attempt, which gives the descriptor to the process that answers
    held = next_held(listener)       # there: which process calls what, and with which arguments
    let_go(listener, held)           # the kernel goes on with the call

It needs no privilege and cannot be taken back; it holds calls of any program, whatever language it is written in. All
other calls cost a few nanoseconds more. Without an answer a call waits; who waits can be killed. A signal that comes
before the other process has looked interrupts the call (EINTR), unless its handler was set to restart calls. So only
what is rarely called is held.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
import sys
from dataclasses import dataclass
from typing import NamedTuple

from autoddp.isolation.kernel import syscalls


class _Held(NamedTuple):
    """A system call that is held."""

    x86_64: int
    aarch64: int
    unless_zero: int | None = None
    """It is let go at once if this argument is zero, which then means this process, or nothing."""


CALLS = {
    "execve": _Held(59, 221),
    "execveat": _Held(322, 281),
    "connect": _Held(42, 203),
    "sendto": _Held(44, 206, unless_zero=4),
    "kill": _Held(62, 129, unless_zero=1),
    "pidfd_send_signal": _Held(424, 424, unless_zero=1),
    "rt_sigqueueinfo": _Held(129, 138, unless_zero=1),
    "settimeofday": _Held(164, 170),
    "clock_settime": _Held(227, 112),
    "sethostname": _Held(170, 161),
    "setdomainname": _Held(171, 162),
    "reboot": _Held(169, 142),
    "swapon": _Held(167, 224),
    "swapoff": _Held(168, 225),
    "init_module": _Held(175, 105),
    "finit_module": _Held(313, 273),
    "delete_module": _Held(176, 106),
}
"""System call → its numbers, see the kernel's `unistd.h` of both processors."""

_OF_MACHINE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Processor → AUDIT_ARCH of its programs. What is compiled for another one, as for 32 bits, has other numbers."""
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _NEW_LISTENER, _WAIT_KILLABLE = 1, 1 << 3, 1 << 5
_SPEC_ALLOW = 1 << 2
"""Without it kernels before 5.16 would make these processes slower than those of the real job."""
_ALLOW, _USER_NOTIF, _CONTINUE = 0x7FFF0000, 0x7FC00000, 1
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32 = 0x40000000  # numbers from there on are those of programs with 32-bit pointers
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION, _RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_PAGE = 4096
_LONGEST_TEXT, _MOST_TEXTS = 128 * 1024, 1024
"""Bytes of a word of a program, and the number of its words: what is longer is cut."""
UNKNOWN = "a call of another kind of processor"


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


@dataclass(frozen=True)
class HeldCall:
    """A system call that waits for an answer."""

    cookie: int
    thread: int
    """The thread that calls; /proc knows it like a process."""
    name: str
    """A name of `CALLS`, or `UNKNOWN`."""
    arguments: tuple[int, ...]

    def signed(self, place: int) -> int:
        """An argument that is an `int`, such as the number of a process."""
        return ctypes.c_int(self.arguments[place] & 0xFFFFFFFF).value

    def memory(self, address: int, size: int) -> bytes:
        """What lies at an address of the process that calls. OSError where it may not be looked at, or has ended."""
        descriptor = os.open(f"/proc/{self.thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, size, address)
        finally:
            os.close(descriptor)

    def text(self, address: int) -> str:
        """The text at an address, up to the zero byte that ends it. OSError as for `memory`."""
        found = b""
        while b"\0" not in found and len(found) < _LONGEST_TEXT:
            here = address + len(found)
            more = self.memory(here, _PAGE - here % _PAGE)  # what follows the page may be no memory
            if not more:
                break
            found += more
        return os.fsdecode(found.partition(b"\0")[0])

    def texts(self, address: int) -> list[str]:
        """The texts whose addresses stand there one after another, up to a zero. OSError as for `memory`."""
        found: list[str] = []
        while len(found) < _MOST_TEXTS:
            pointer = int.from_bytes(self.memory(address + 8 * len(found), 8), sys.byteorder)
            if not pointer:
                break
            found.append(self.text(pointer))
        return found


def hold_calls() -> int:
    """Hold `CALLS` of this process, and of what it starts from now on; the descriptor for `next_held`.

    For a process with one thread. OSError where the kernel does not have it (before Linux 5.5, other processors), or
    where somebody outside holds calls of this process already, as some containers do.
    """
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in _OF_MACHINE:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "seccomp")
    instructions = b"".join(struct.pack("=HBBI", *one) for one in _filter(machine))
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.addressof(buffer))
    flags = _SPEC_ALLOW | _NEW_LISTENER
    try:
        return _install(program, flags | _WAIT_KILLABLE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _install(program, flags)  # before Linux 5.19 a signal may interrupt a call that is looked at


def _install(program: _Program, flags: int) -> int:
    def call() -> int:
        number = _SECCOMP[platform.machine()]
        arguments = (ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(flags), ctypes.byref(program))
        return syscalls.call("seccomp", number, *arguments)

    try:
        return call()
    except PermissionError:  # an ordinary process has to give up set-user-ID programs first
        syscalls.give_up_new_privileges()
        return call()


def _filter(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter's instructions: operation, jumps if true and if false, and a number."""
    instructions = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_IF_EQUAL, 1, 0, _OF_MACHINE[machine]),
        (_RETURN, 0, 0, _USER_NOTIF),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _USER_NOTIF),
    ]
    for held in CALLS.values():
        number = getattr(held, machine)
        if held.unless_zero is None:
            instructions += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _USER_NOTIF)]
        else:
            instructions += [
                (_IF_EQUAL, 0, 4, number),
                (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * held.unless_zero),  # its lower half
                (_IF_EQUAL, 0, 1, 0),
                (_RETURN, 0, 0, _ALLOW),
                (_RETURN, 0, 0, _USER_NOTIF),
            ]
    return [*instructions, (_RETURN, 0, 0, _ALLOW)]


def next_held(listener: int) -> HeldCall | None:
    """The next call that is held, for which it waits; None if its process has been killed or interrupted meanwhile."""
    buffer = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):
            return None
        raise
    cookie, thread, _flags, number, machine, _where, *arguments = _NOTIFICATION.unpack(buffer)
    name = UNKNOWN
    if machine == _OF_MACHINE[platform.machine()]:
        name = next((name for name, held in CALLS.items() if getattr(held, platform.machine()) == number), UNKNOWN)
    return HeldCall(cookie, thread, name, tuple(arguments))


def let_go(listener: int, held: HeldCall) -> None:
    """Let the kernel go on with a call."""
    answer = bytearray(_RESPONSE.pack(held.cookie, 0, 0, _CONTINUE))
    try:
        fcntl.ioctl(listener, _SEND, answer)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EINPROGRESS):  # killed or interrupted meanwhile
            raise
