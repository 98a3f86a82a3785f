"""The process that starts tuning attempts, supervises them, and removes what they leave.

    keeper = Keeper()                            # before any thread is started, because it forks
    failure = keeper.run(attempt, heard, stops)  # elastic runs in a child of the keeper, isolated; "" or why it failed
    keeper.close()

It is a process of its own because only a process with one thread can enter a user namespace, and the launcher has many.
The keeper never has more than one. It also outlives a launcher that is killed: it then ends every process of the
attempt, removes the scratch folders and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from autoddp.errors import first_line
from autoddp.isolation import Level
from autoddp.isolation.caches import keep_caches
from autoddp.isolation.overlay import Layers, OverlayRefused, enter
from autoddp.launch.processes import fork, how_ended, kill_descendants
from autoddp.launch.removal import remove_folder
from autoddp.launch.signals import ENDING


@dataclass(frozen=True)
class Shelter:
    """The isolation of one attempt."""

    level: Level
    layers: Layers | None = None
    """Under overlay: where the upper layers are."""
    real: tuple[str, ...] = ()
    """Folders in which writes are real."""
    important: tuple[str, ...] = ()
    """Folders that the overlay must have, see `isolation.overlay.enter`."""
    landlock: bool = False
    """Under guard: whether the kernel is asked to refuse writes outside `real`."""
    shared_memory: str = ""
    """Under guard: a file with the names of what the script has made in shared memory."""


@dataclass(frozen=True)
class Attempt:
    """One start of the user's script for tuning."""

    torchrun: argparse.Namespace
    folder: Path
    """The run's folder."""
    number: int
    environment: dict[str, str]
    shelter: Shelter


@dataclass(frozen=True)
class ProcessEnded:
    """A rank's process has ended."""

    pid: int
    how: str
    """"killed by SIGABRT" or "ended with exit code 1"."""


@dataclass(frozen=True)
class _Result:
    """What the attempt's own process says at its end: "" or why it failed."""

    failure: str


@dataclass(frozen=True)
class _AttemptEnded:
    """The attempt's process and all that it started are gone."""

    how: str


_Request = Attempt | Shelter | tuple[str, ...]
"""An attempt to start; a shelter to try, answered with why this host cannot have it, or ""; or folders to remove when
the keeper ends, for whatever reason."""
_STOP = "stop"
_ASKS = 0.5  # seconds between two questions whether the attempt is to be stopped
_LOOKS = 0.02  # seconds between two looks for children that have ended: elastic collects them soon after
_GONE = "the process that watches over the attempt was killed"


class Keeper:
    """The launcher's side of the keeper."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self.pid = fork()
        if self.pid == 0:
            self._connection.close()
            _serve(theirs)
        theirs.close()

    def why_no_overlay(self, shelter: Shelter) -> str:
        """Why an attempt cannot have this shelter's overlay; "" if it can."""
        try:
            self._connection.send(shelter)
            return str(self._connection.recv())
        except (EOFError, ConnectionError):
            return _GONE

    def removes(self, folders: Sequence[str]) -> None:
        """Have these folders removed at the end, also if the launcher is killed."""
        with contextlib.suppress(ConnectionError):  # the keeper is gone, and the launcher removes them itself
            self._connection.send(tuple(folders))

    def run(self, attempt: Attempt, heard: Callable[[ProcessEnded], None], stops: Callable[[], bool]) -> str:
        """Start the attempt and wait for its end; "" or why it failed. `stops()` is asked every half second.

        `heard` is told of each rank's process that ends.
        """
        failure: str | None = None
        try:
            self._connection.send(attempt)
            while True:
                if not self._connection.poll(_ASKS):
                    if stops():
                        self._connection.send(_STOP)
                    continue
                message = self._connection.recv()
                if isinstance(message, ProcessEnded):
                    heard(message)
                elif isinstance(message, _Result):
                    failure = message.failure
                else:
                    return f"torch elastic, which starts the ranks, {message.how}" if failure is None else failure
        except (EOFError, ConnectionError):
            return _GONE

    def close(self) -> None:
        """End the attempt, if one runs, and the keeper; returns once nothing is left."""
        self._connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


# From here on: in the keeper's process


def _serve(connection: Connection) -> None:
    """All that the keeper does; never returns."""
    code = 1
    try:
        for number in ENDING:  # it ends after the launcher, and not before it has cleaned up
            signal.signal(number, signal.SIG_IGN)
        # Some schedulers start the launcher with SIGCHLD ignored: the kernel then keeps no exit code of a child.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        if sys.platform == "linux":
            from autoddp.isolation.syscalls import adopt_orphans

            adopt_orphans()
        _obey(connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _obey(connection: Connection) -> None:
    """Do what the launcher asks for, until it has gone; then clean up."""
    removed: list[str] = []
    try:
        while True:
            request: _Request | str = connection.recv()
            if isinstance(request, Attempt):
                _run(connection, request)
            elif isinstance(request, Shelter):
                connection.send(_why_not(request))
            elif isinstance(request, tuple):
                removed += request
            # else: it is told to stop an attempt that has ended in the meantime
    except (EOFError, OSError):  # the launcher has gone
        pass
    finally:
        kill_descendants()
        for folder in removed:
            remove_folder(folder)


def _why_not(shelter: Shelter) -> str:
    """Why this host cannot have the shelter, or "". A child tries it: no process can leave a namespace again."""
    reader, writer = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        why = "it ended too early"
        try:
            _enter(shelter)
            why = ""
        except BaseException as error:
            why = str(error) if isinstance(error, OverlayRefused) else repr(error)
        finally:
            writer.send(why)
            os._exit(0)
    writer.close()
    try:
        why = str(reader.recv())
    except EOFError:
        why = "the process that tried it was killed"
    reader.close()
    os.waitpid(child, 0)
    if shelter.layers is not None:
        remove_folder(shelter.layers.scratch)
    return why


def _run(connection: Connection, attempt: Attempt) -> None:
    """One attempt, to its end or the launcher's."""
    alive, child_holds = os.pipe()  # closed by the kernel when the child ends
    child = os.fork()
    if child == 0:
        os.close(alive)
        _attempt(connection, attempt, child_holds)
    os.close(child_holds)
    try:
        while alive not in wait([connection, alive]):
            if connection.recv() == _STOP:  # EOFError: the launcher has gone
                break
    finally:
        os.close(alive)
        os.kill(child, signal.SIGKILL)  # its id is still its own if it has ended, because it was not collected
        _, status = os.waitpid(child, 0)
        kill_descendants()
        _clean_up_after(attempt.shelter)
    how = how_ended(os.waitstatus_to_exitcode(status))
    connection.send(_AttemptEnded(f"was {how}" if how.startswith("killed") else how))


def _clean_up_after(shelter: Shelter) -> None:
    """Caches stay for the next attempt, everything else is removed."""
    if shelter.shared_memory:
        _remove_shared_memory(shelter.shared_memory)
    if shelter.layers is not None:
        with contextlib.suppress(OSError):  # a cache that is not kept is made again
            keep_caches(shelter.layers, os.environ, shelter.important)
        remove_folder(shelter.layers.scratch)


def _attempt(connection: Connection, attempt: Attempt, alive: int) -> None:
    """The attempt's own process: isolated, then elastic; never returns."""
    failure = "it could not begin"
    try:
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        _close_all_but(connection.fileno(), alive)
        _own_standard_input()
        os.environ.clear()
        os.environ.update(attempt.environment)
        _enter(attempt.shelter)
        threading.Thread(target=_report_ends, args=(connection,), name="autoddp-ends", daemon=True).start()
        from autoddp.launch.elastic import run_tuning_job

        failure = run_tuning_job(attempt.torchrun, attempt.folder, attempt.number)
    except OverlayRefused as refused:
        failure = str(refused)
    except BaseException as error:
        failure = f"elastic gave up: {first_line(error)}"
    finally:
        with contextlib.suppress(OSError):
            connection.send(_Result(failure))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _enter(shelter: Shelter) -> None:
    if sys.platform == "linux":
        from autoddp.isolation.syscalls import die_with_parent

        die_with_parent(signal.SIGKILL)
    if shelter.level is Level.OVERLAY:
        assert shelter.layers is not None
        enter(shelter.layers, shelter.real, shelter.important)
    elif shelter.landlock:
        from autoddp.isolation.landlock import restrict_writes

        restrict_writes(shelter.real)


def _close_all_but(*kept: int) -> None:
    """By a descriptor that was opened before the overlay was mounted, the script could write past the overlay."""
    for name in os.listdir("/dev/fd"):
        number = int(name)
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)


def _own_standard_input() -> None:
    """Keep what the script reads from standard input while it is tuned for the real job, which reads it again."""
    try:
        mode = os.fstat(0).st_mode
        if stat.S_ISREG(mode):
            position, again = os.lseek(0, 0, os.SEEK_CUR), os.open("/dev/fd/0", os.O_RDONLY)
            os.lseek(again, position, os.SEEK_SET)
        elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            again = os.open(os.devnull, os.O_RDONLY)  # what is read from a pipe cannot be read again
        else:
            return
    except OSError:
        return  # there is no standard input
    os.dup2(again, 0)
    os.close(again)


def _report_ends(connection: Connection) -> None:
    """Tell the launcher how each rank's process ended, and leave the exit code for elastic to collect."""
    told: set[int] = set()
    while True:
        try:
            result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            result = None
        if result is None or result.si_pid in told:
            time.sleep(_LOOKS)  # none has ended, or elastic has not collected this one yet
            continue
        told.add(result.si_pid)
        killed = result.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        with contextlib.suppress(OSError):
            connection.send(ProcessEnded(result.si_pid, how_ended(-result.si_status if killed else result.si_status)))


def _remove_shared_memory(path: str) -> None:
    """Remove the files that a list names, if they are this user's and directly in /dev/shm; then remove the list."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        for name in set(file.read().split("\n")):
            place = os.path.join("/dev/shm", name)
            with contextlib.suppress(OSError):
                found = os.lstat(place)
                if name and "/" not in name and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                    os.unlink(place)
    with contextlib.suppress(OSError):
        os.unlink(path)
