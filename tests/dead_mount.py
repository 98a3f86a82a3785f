"""A file system that does not answer, as a hard NFS mount whose server is down: run as root, as

    python dead_mount.py FOLDER PROGRAM [WORD ...]

The program runs in a mount namespace in which FOLDER is a FUSE file system. Its server, this process, answers none of
the kernel's questions, so whoever waits for an answer cannot even be killed. The exit code is the program's. Whoever
still waits is released when this process ends. The file FOLDER.asked is there as soon as somebody waits.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 16384, 1 << 18
_INIT = 26
_HEADER = "=IIQQIIII"  # fuse_in_header: len, opcode, unique, …
_ANSWER = "=IiQ" + "IIIIHHIIHH32x"  # fuse_out_header and fuse_init_out


def serve(device: int, asked_for: str) -> None:
    """Answer the first question, after which the kernel asks others. At those make the file `asked_for` instead."""
    while True:
        asked = os.read(device, 1 << 20)
        _, opcode, unique, *_ = struct.unpack_from(_HEADER, asked)
        if opcode == _INIT:
            size = struct.calcsize(_ANSWER)
            os.write(device, struct.pack(_ANSWER, size, 0, unique, 7, 31, 0, 0, 12, 9, 4096, 1, 0, 0))
        else:
            os.close(os.open(asked_for, os.O_CREAT))


def main(folder: str, *program: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    data = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other".encode()
    for result in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", b"", ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None),
        libc.mount(b"dead", os.fsencode(folder), b"fuse", ctypes.c_ulong(0), data),
    ):
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    child = os.fork()
    if child == 0:
        os.execvp(program[0], program)
    threading.Thread(target=serve, args=(device, f"{folder}.asked"), daemon=True).start()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)
