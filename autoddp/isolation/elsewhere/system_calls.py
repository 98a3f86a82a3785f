"""Judges the system calls of an attempt that may reach beyond it, whatever program makes them.

    judge_call(held)      # in the keeper: "" if the kernel may go on with it, else what it would change

A program that `tools` knows must not start where its words say that it changes something elsewhere.
A Python of the attempt checks what it sends by itself, by its meaning. Of any other program nobody knows what it sends:
so it must not connect to anything outside the attempt, unless `tools` knows that, called like this, it only reads.
Not promised: datagrams that a program sends over a connected socket or by `sendmsg`, and what goes by io_uring.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from signal import Signals

from autoddp.isolation.children import checks_itself
from autoddp.isolation.elsewhere.known import acts_for, program_of, starters_of, tool_of, words_of
from autoddp.isolation.elsewhere.own import is_here, is_own_process, process_of, receives, serves_path, serves_port
from autoddp.isolation.elsewhere.sockets import ANSWERS
from autoddp.isolation.kernel.seccomp import UNKNOWN, HeldCall
from autoddp.isolation.mps import mps_folder
from autoddp.isolation.reporting import SHELLS

_LARGEST_ADDRESS = 128  # bytes, as the kernel's sockaddr_storage
_ONLY_ANSWER = (
    # names of users and of hosts
    "/run/nscd/",
    "/var/run/nscd/",
    "/var/lib/sss/",
    "/run/systemd/userdb/",
    "/run/systemd/resolve/",
    "/run/avahi-daemon/",
    "/run/nslcd/",
    "/var/run/nslcd/",
    "/run/samba/winbindd/",
    "/var/run/samba/winbindd/",
    "/var/centrifydc/",
    # who the user is
    "/run/munge/",
    "/var/run/munge/",
    # drivers of GPUs
    "/run/nvidia-",
    "/var/run/nvidia-",
)
"""Beginnings of the paths of servers on this machine that keep nothing of what they are asked. One that is missing here
only ends tuning."""
_NAME_SERVICES = (88, 111, 389, 636)
"""Ports of servers on a network that tell programs in C who a user is: Kerberos, NIS, LDAP."""
_HERE = -100  # AT_FDCWD: the working folder, in place of a descriptor
_MODULES, _ADMIN, _BOOT, _TIME = 16, 21, 22, 25  # as in the kernel's `capability.h`
_CAPABILITIES = {
    **dict.fromkeys(("settimeofday", "clock_settime"), _TIME),
    **dict.fromkeys(("sethostname", "setdomainname", "swapon", "swapoff"), _ADMIN),
    **dict.fromkeys(("init_module", "finit_module", "delete_module"), _MODULES),
    "reboot": _BOOT,
}
"""System call → the capability that it needs: without it the kernel refuses the call, as in the real job."""


def judge_call(held: HeldCall) -> str:
    """ "" if the kernel may go on with a call, else what it would change.

    `own.count_below` has said which processes are the attempt's. OSError if the process has ended, or must not be
    looked at.
    """
    if held.name in _CAPABILITIES:
        may = _capabilities(held.thread) >> _CAPABILITIES[held.name] & 1
        return f"{program_of(held.thread)} changes this machine ({held.name})" if may else ""
    return _JUDGES[held.name](held)


def _starts(held: HeldCall) -> str:
    """Judge the program that takes the place of the one that calls."""
    in_folder = held.name == "execveat"
    path, words = held.arguments[in_folder:][:2]
    folder = f"fd/{held.signed(0)}" if in_folder and held.signed(0) != _HERE else "cwd"
    name, given = held.text(path), held.texts(words)
    # The first word is only what the program is told to be called. It says more where the path is a descriptor's.
    for started in ([name, *given[1:]], given or [name]):
        if tool_of(started) is not None and _is_there(held.thread, folder, name):
            return next(filter(None, (one.changes for one in acts_for(started, starters_of(held.thread)))), "")
    return ""


def _is_there(process: int, folder: str, path: str) -> bool:
    """Whether a process would find something at a path: a shell tries each folder of PATH. "" is the folder itself."""
    place = f"root{path}" if path[:1] == "/" else f"{folder}/{path}".rstrip("/")
    return os.path.lexists(f"/proc/{process}/{place}")


def _connects(held: HeldCall) -> str:
    return _reaches(held, held.arguments[1], held.arguments[2], by_datagrams=False)


def _sends_to(held: HeldCall) -> str:
    return _reaches(held, held.arguments[4], held.arguments[5], by_datagrams=True)


def _reaches(held: HeldCall, where: int, size: int, by_datagrams: bool) -> str:
    """Judge what a program opens a connection to, or sends a datagram to."""
    if checks_itself(held.thread):
        return ""
    address = held.memory(where, min(size & 0xFFFFFFFF, _LARGEST_ADDRESS))
    place = _outside(held, address, by_datagrams)
    if not place:
        return ""
    known = acts_for(words_of(held.thread), starters_of(held.thread))
    if known:
        return next(filter(None, (one.changes for one in known)), "")
    does = "sends data" if by_datagrams else "connects"
    return f"{program_of(held.thread)} {does} to {place}, and autoddp does not know what it does there"


def _outside(held: HeldCall, address: bytes, by_datagrams: bool) -> str:
    """The place of an address, if it is outside the attempt; else ""."""
    family = int.from_bytes(address[:2], "little")
    if family in (socket.AF_UNSPEC, socket.AF_NETLINK):
        return ""
    if family == socket.AF_UNIX:
        return _outside_by_path(held, address[2:], by_datagrams)
    if family not in (socket.AF_INET, socket.AF_INET6) or len(address) < 8:
        return "another machine"
    (port,) = struct.unpack_from("!H", address, 2)
    host = socket.inet_ntop(family, address[4:8] if family == socket.AF_INET else address[8:24].ljust(16, b"\0"))
    only_connects = not by_datagrams and _is_for_datagrams(held)
    if port in (*ANSWERS, *_NAME_SERVICES) or (only_connects and not _is_shell(held.thread)):
        return ""
    if is_here(family, host) and (receives if by_datagrams or only_connects else serves_port)(port):
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _outside_by_path(held: HeldCall, name: bytes, by_datagrams: bool) -> str:
    if not name or name[0] == 0:
        path = os.fsdecode(name)
    else:
        folder = os.readlink(f"/proc/{held.thread}/cwd")
        path = os.path.normpath(os.path.join(folder, os.fsdecode(name.partition(b"\0")[0])))
    driver = mps_folder(os.environ)
    if path.startswith((*_ONLY_ANSWER, *([f"{driver}/"] if driver else []))):
        return ""
    return "" if (receives if by_datagrams else serves_path)(path) else path.replace("\0", "@", 1)


def _is_for_datagrams(held: HeldCall) -> bool:
    """Whether the socket is for datagrams: connecting one sends nothing; by it libc sorts the addresses of a name."""
    with contextlib.suppress(OSError):
        kind = os.getxattr(f"/proc/{held.thread}/fd/{held.signed(0)}", "system.sockprotoname")
        return kind.startswith((b"UDP", b"PING"))
    return False


def _is_shell(process: int) -> bool:
    """Whether a process is a shell: it connects a socket for datagrams to send by it, `echo x >/dev/udp/host/8125`."""
    return os.path.basename(words_of(process)[0]) in SHELLS


def _signals(held: HeldCall) -> str:
    process, signal = held.signed(0), str(held.signed(1))
    if held.name == "pidfd_send_signal":
        process = process_of(process, held.thread)
        if process < 0:
            return ""
    if process == 0 or (process != -1 and is_own_process(abs(process))):
        return ""
    with contextlib.suppress(ValueError):
        signal = Signals(held.signed(1)).name
    whom = "every process" if process == -1 else f"process {abs(process)}, which this run did not start"
    return f"{program_of(held.thread)} sends {signal} to {whom}"


def _of_another_processor(held: HeldCall) -> str:
    return f"{program_of(held.thread)} is for another kind of processor, so autoddp does not see what it sends"


_JUDGES: dict[str, Callable[[HeldCall], str]] = {
    "execve": _starts,
    "execveat": _starts,
    "connect": _connects,
    "sendto": _sends_to,
    "kill": _signals,
    "pidfd_send_signal": _signals,
    "rt_sigqueueinfo": _signals,
    UNKNOWN: _of_another_processor,
}


def _capabilities(process: int) -> int:
    with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
