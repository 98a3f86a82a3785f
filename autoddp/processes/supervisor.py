"""`--no-orphans`: a process that ends all that a job has started, as soon as its launcher has ended.

    run_below_a_supervisor()     # before any thread of torch's or ours; returns in another process

From then on there are three processes:

    the command        the one that the user has started: it passes signals on, and ends with the launcher's status
      └─ supervisor    adopts every process below it whose parent ends
           └─ launcher the caller goes on here; it starts the ranks

When the launcher has ended, or the command has been killed, the supervisor ends every process below it: loader
workers, programs in sessions of their own, processes whose parents have ended long ago. None of them was there before.

The supervisor and the launcher each have a session of their own. So a signal from the terminal, or for a process
group, comes to the command alone, which passes it on once, and a SIGKILL for its group does not reach the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator

from autoddp.errors import UsageError
from autoddp.log import tell
from autoddp.processes import children as processes

_LEAVING = 1.0  # seconds that helpers have for ending by themselves after the launcher has
_TERMINATING = 6.0  # seconds between SIGTERM and SIGKILL; with the rest, all is over within ten
_OTHERS = (
    # They cannot be handled, concern one process alone, or stop and continue it, which leaves torchrun's ranks alone.
    "SIGKILL SIGSTOP SIGCHLD SIGCONT SIGTSTP SIGTTIN SIGTTOU SIGWINCH SIGURG SIGPIPE SIGSEGV SIGBUS SIGFPE SIGILL "
    "SIGABRT SIGTRAP SIGSYS SIGXCPU SIGXFSZ"
).split()
PASSED_ON = frozenset(signal.valid_signals()) - {getattr(signal, name) for name in _OTHERS if hasattr(signal, name)}
"""Signals that the command passes on to the launcher: torchrun handles any that `--signals-to-handle` names."""


def run_below_a_supervisor() -> None:
    """Fork twice; returns in the launcher's process. The caller's process ends here, as the launcher ends.

    UsageError where the system has no such supervisors.
    """
    if sys.platform != "linux":
        raise UsageError("--no-orphans: only Linux lets a process adopt orphans; leave the option out here")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until each process is ready for them
    ours, theirs = socket.socketpair()
    supervisor = processes.fork()
    if supervisor == 0:
        ours.close()
        _become_supervisor(theirs, before)
        return
    theirs.close()
    _end_as(_status_at_the_end(ours, supervisor, before))


# In the command's process


def _status_at_the_end(connection: socket.socket, supervisor: int, mask: Iterable[int]) -> int:
    """Pass signals on until the launcher has ended and nothing is left below it; its status."""

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # the supervisor has gone
            connection.send(bytes([number]))

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    said = connection.recv(64)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(supervisor, 0)
    if not said:
        tell("--no-orphans: the process that watches over the job was killed; processes of the job may be left")
        return int(signal.SIGKILL)
    return int(said)


def _end_as(status: int) -> None:
    """End this process with another one's status: its exit code, or by its signal."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file is enough
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code  # the kernel spares a container's first process
    sys.exit(code)


# In the supervisor's process


def _become_supervisor(connection: socket.socket, mask: Iterable[int]) -> None:
    """Fork the launcher, in which this returns; the supervisor itself never does."""
    from autoddp.isolation.kernel.syscalls import adopt_orphans, die_with_parent

    os.setsid()
    adopt_orphans()
    own = os.getpid()
    launcher = processes.fork()
    if launcher == 0:
        connection.close()
        os.setsid()
        # If it is the supervisor that is killed, the launcher still ends its ranks.
        die_with_parent(signal.SIGTERM, own)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    try:
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = _until_one_has_gone(connection, launcher)
        _end_what_is_left(launcher if status is None else None)
        if status is not None:
            connection.send(str(status).encode())
    except BaseException:
        traceback.print_exc()
        processes.kill_descendants()
    finally:
        os._exit(0)


def _until_one_has_gone(connection: socket.socket, launcher: int) -> int | None:
    """Send the launcher what the command passes on. The launcher's status, or None where the command was killed."""
    with _woken_by_children() as woken:
        while True:
            status = processes.collect().get(launcher)
            if status is not None:
                return status
            readable = select.select([connection, woken], [], [])[0]
            if woken in readable:
                woken.recv(4096)
            elif connection in readable:
                passed = connection.recv(64)
                if not passed:
                    return None
                for number in passed:
                    os.kill(launcher, number)  # no other process can have its id before it is collected


@contextlib.contextmanager
def _woken_by_children() -> Iterator[socket.socket]:
    """A socket that can be read once a child has ended."""
    woken, wakes = socket.socketpair()
    with woken, wakes:
        wakes.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        yield woken
        signal.set_wakeup_fd(-1)


def _end_what_is_left(launcher: int | None) -> None:
    """End every process below. `launcher`: the launcher's id where it still runs, since the command was killed."""
    if launcher is not None:
        # Not by SIGTERM: it would note down that its ranks have failed, which are ended here beside it.
        os.kill(launcher, signal.SIGKILL)
    elif processes.gone_within(_LEAVING):
        return
    left = processes.named_descendants(launcher)
    if left:
        why = "the job has left behind" if launcher is None else "the launcher, which was killed, has left behind"
        tell(f"--no-orphans: ending what {why}: {left}")
    processes.terminate_descendants()
    if not processes.gone_within(_TERMINATING):
        processes.kill_descendants()
