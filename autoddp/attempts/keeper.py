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
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from autoddp.errors import first_line
from autoddp.isolation import Level
from autoddp.isolation.caches import keep_caches
from autoddp.isolation.overlay import Layers, OverlayRefused, enter
from autoddp.log import tell
from autoddp.processes.children import collect_orphans, descendants, fork, how_ended, kill_child, kill_descendants
from autoddp.processes.polling import polls
from autoddp.processes.signals import NOT_FOR_THE_KEEPER
from autoddp.processes.silence import awaiting
from autoddp.processes.standard_streams import StandardStreams, silent_terminal
from autoddp.runs.removal import remove_folder
from autoddp.wire.worker_config import KEEPER

if TYPE_CHECKING:
    from autoddp.isolation.elsewhere.programs import ProgramWatch


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
    """Under guard: a file that lists what the script has made in shared memory, see `isolation.guard.shared_memory`."""


@dataclass(frozen=True)
class Attempt:
    """One start of the user's script for tuning."""

    torchrun: argparse.Namespace
    folder: Path
    """The attempt's own."""
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
_COLLECTS = 0.5  # seconds between two looks for orphans that have ended
_TRIES = 20.0  # seconds for an overlay, which takes less than one where all file systems answer
_DIES = 3.0  # seconds in which the process that has tried it must be gone after SIGKILL
_FIRST_WORD = 5.0  # seconds without the keeper's answer until a line says so
_ANSWERS = 60.0  # seconds for that answer from then on
_SILENT = "the process that watches over the attempt does not answer"
_GONE = "the process that watches over the attempt was killed"
_LEFT = "this start of the script to end, and what it has written to be removed"
_heeded: list[int] = []
"""Signals that the keeper alone ignores. What the launcher was started to ignore, an attempt ignores as jobs do."""


class Keeper:
    """The launcher's side of the keeper."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._is_silent = False
        # Until the child ignores them: a signal to the whole group must not make it do what the launcher does.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = fork()
            if self.pid == 0:
                self._connection.close()
                _serve(theirs, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def why_no_overlay(self, shelter: Shelter) -> str:
        """Why an attempt cannot have this shelter's overlay; "" if it can."""
        try:
            self._connection.send(shelter)
            if not self._connection.poll(_FIRST_WORD):
                tell("looking at the file systems of this host takes long: one of them may not answer")
            with awaiting("the file systems of this host"):
                if self._connection.poll(_ANSWERS):
                    return str(self._connection.recv())
            self._is_silent = True
            return _SILENT
        except (EOFError, ConnectionError):
            return _GONE

    def removes(self, folders: Sequence[str]) -> None:
        """Have these folders removed at the end, also if the launcher is killed."""
        with contextlib.suppress(ConnectionError):  # the keeper is gone, and the launcher removes them itself
            self._connection.send(tuple(folders))

    def run(self, attempt: Attempt, heard: Callable[[ProcessEnded], None], stops: Callable[[], bool]) -> str:
        """Start the attempt and wait for its end; "" or why it failed.

        `stops()` is asked every half second, until it says so or elastic has ended: what is seen of the script later,
        while all that it has written is removed, is no part of the attempt. `heard` is told of each rank's process that
        ends.
        """
        if self._is_silent:
            return _SILENT
        failure: str | None = None
        is_over = False
        with contextlib.ExitStack() as ending:

            def ends() -> bool:
                ending.enter_context(awaiting(_LEFT))
                return True

            try:
                self._connection.send(attempt)
                while True:
                    if not self._connection.poll(_ASKS):
                        if not is_over and stops():
                            is_over = ends()
                        if is_over:
                            self._continue()
                            self._connection.send(_STOP)
                        continue
                    message = self._connection.recv()
                    if isinstance(message, ProcessEnded):
                        heard(message)
                    elif isinstance(message, _Result):
                        failure, is_over = message.failure, is_over or ends()
                    else:
                        return f"torch elastic, which starts the ranks, {message.how}" if failure is None else failure
            except (EOFError, ConnectionError):
                return _GONE

    def close(self) -> None:
        """End the attempt, if one runs, and the keeper; returns once nothing is left."""
        self._connection.close()
        with contextlib.suppress(ChildProcessError):
            if self._is_silent:
                kill_child(self.pid)
                return
            for _ in polls(_FIRST_WORD, _LOOKS):
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    return
            self._continue()
            removing = f"the process that removes what the script has left ({self.pid})"
            tell(f"waiting for {removing}")
            with awaiting(removing):
                os.waitpid(self.pid, 0)

    def _continue(self) -> None:
        """Continue the keeper, in case a signal has stopped it: until then it could not do what it is told to."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)


# From here on: in the keeper's process


def _serve(connection: Connection, mask: Collection[int]) -> None:
    """All that the keeper does; never returns. `mask`: the signals that are to be blocked once others are ignored."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)  # the launcher's, which tells it of its own signals
        # It ends after the launcher, and not before it has cleaned up. `--signals-to-handle` may add any signal.
        handled = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]
        for number in (*NOT_FOR_THE_KEEPER, *handled):
            if signal.signal(number, signal.SIG_IGN) is not signal.SIG_IGN:
                _heeded.append(number)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Some schedulers start the launcher with SIGCHLD ignored: the kernel then keeps no exit code of a child.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _obey(connection, _why_not_here())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _why_not_here() -> str:
    """Become what a keeper must be; why this system does not let it, as some sandboxes do not, or ""."""
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            from autoddp.isolation.kernel.syscalls import adopt_orphans

            adopt_orphans()
    except OSError as error:
        call = error.filename or "setpgid"
        return f"this system refuses {call} ({error.strerror}), without which nobody could end what the script starts"
    return ""


def _obey(connection: Connection, why_not_here: str) -> None:
    """Do what the launcher asks for, until it has gone; then clean up. `why_not_here`: why there can be no attempt."""
    removed: list[str] = []
    try:
        while True:
            request: _Request | str = connection.recv()
            if isinstance(request, Attempt) and why_not_here:
                connection.send(_Result(why_not_here))
                connection.send(_AttemptEnded("has not begun"))
            elif isinstance(request, Attempt):
                _run(connection, request)
            elif isinstance(request, Shelter):
                connection.send(_why_not(request, connection))
            elif isinstance(request, tuple):
                removed += request
            # else: it is told to stop an attempt that has ended in the meantime
    except (EOFError, OSError):  # the launcher has gone
        pass
    finally:
        kill_descendants()
        for folder in removed:
            remove_folder(folder)


def _why_not(shelter: Shelter, launcher: Connection) -> str:
    """Why this host cannot have the shelter, or "". A child tries it: no process can leave a namespace again.

    The child looks at every mount of the host. One that does not answer must hold up neither the job nor its end.
    """
    reader, writer = Pipe(duplex=False)
    own = os.getpid()
    child = os.fork()
    if child == 0:
        _try(own, shelter, writer)
    writer.close()
    why = _outcome(reader, launcher)
    reader.close()
    kill_child(child, _DIES)
    if shelter.layers is not None:
        remove_folder(shelter.layers.scratch)
    return why


@dataclass(frozen=True)
class _LooksAt:
    """The path at which the process that tries a shelter is about to look."""

    path: str


def _try(keeper: int, shelter: Shelter, writer: Connection) -> None:
    """The child's part of `_why_not`; never returns. `keeper`: the keeper's process id."""
    why = "it ended too early"
    try:
        _close_all_but(writer.fileno())
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):  # whoever reads the launcher's output need not wait for a child that cannot be killed
            os.dup2(nowhere, number)
        _end_with(keeper)
        _enter(shelter, lambda path: writer.send(_LooksAt(path)))
        why = ""
    except BaseException as error:
        why = str(error) if isinstance(error, OverlayRefused) else repr(error)
    finally:
        writer.send(why)
        os._exit(0)


def _outcome(reader: Connection, launcher: Connection) -> str:
    """What the child of `_why_not` says, or why it says nothing."""
    place, until = "", time.monotonic() + _TRIES
    while ready := wait([reader, launcher], max(0.0, until - time.monotonic())):
        if reader not in ready:
            return "the launcher has gone"  # it sends nothing while it waits
        try:
            said = reader.recv()
        except EOFError:
            return "the process that tried it was killed"
        if not isinstance(said, _LooksAt):
            return str(said)
        place = said.path
    return f"the file system at {place} does not answer" if place else "it takes too long"


def _run(connection: Connection, attempt: Attempt) -> None:
    """One attempt, to its end or the launcher's."""
    from autoddp.isolation.children import VARIABLE
    from autoddp.isolation.elsewhere.programs import ProgramWatch

    streams = StandardStreams()
    alive, child_holds = os.pipe()  # closed by the kernel when the child ends
    watch = ProgramWatch(attempt.environment.get(VARIABLE, ""))
    own = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(alive)
        _attempt(own, connection, attempt, child_holds, watch)
    os.close(child_holds)
    watch.begin(child)
    try:
        while alive not in (ready := wait([connection, alive, *watch.awaited], _COLLECTS)):
            if connection in ready and connection.recv() == _STOP:  # EOFError: the launcher has gone
                break
            if any(one in ready for one in watch.awaited):
                watch.answer()
            # Also where there is always something to answer, as where the script starts programs all the time.
            collect_orphans(child)
            watch.look(descendants)
    finally:
        os.close(alive)
        status = kill_child(child)
        kill_descendants()
        watch.close()
        streams.restore()
        _clean_up_after(attempt.shelter)
    how = "could not be ended" if status is None else how_ended(os.waitstatus_to_exitcode(status))
    connection.send(_AttemptEnded(f"was {how}" if how.startswith("killed") else how))


def _clean_up_after(shelter: Shelter) -> None:
    """Caches stay for the next attempt, everything else is removed."""
    if shelter.shared_memory:
        _remove_shared_memory(shelter.shared_memory)
    if shelter.layers is not None:
        with contextlib.suppress(OSError):  # a cache that is not kept is made again
            keep_caches(shelter.layers, os.environ, shelter.important)
        remove_folder(shelter.layers.scratch)


def _attempt(keeper: int, connection: Connection, attempt: Attempt, alive: int, watch: ProgramWatch) -> None:
    """Be the attempt's own process: isolate it, then run elastic in it. Never returns."""
    from autoddp.isolation.elsewhere.own import pid_namespace
    from autoddp.torchrun.options import other_program

    failure = "it could not begin"
    try:
        _end_with(keeper)
        for number in _heeded:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()  # the terminal stops no process of another session, such as elastic where it prints a warning
        _be_the_first_to_be_killed()
        _close_all_but(connection.fileno(), alive, watch.fileno())
        os.environ.clear()
        os.environ.update(attempt.environment)
        os.environ[KEEPER] = f"{keeper} {pid_namespace()}"
        tempfile.tempdir = None  # Python keeps the launcher's; guard gives TMPDIR, and elastic makes files there
        _enter(attempt.shelter)
        if not watch.hold():
            watch.judge_ranks(other_program(attempt.torchrun))
        _own_standard_input()
        warnings.simplefilter("ignore")  # elastic leaves the ranks' logs open, of which Python warns under -X dev
        threading.Thread(target=_report_ends, args=(connection,), name="autoddp-ends", daemon=True).start()
        from autoddp.torchrun.jobs import run_tuning_job

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


def _be_the_first_to_be_killed() -> None:
    """Let the kernel end what is tuned where memory runs out.

    It takes the largest process, which may else be another program of the user's, such as the notebook beside it.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _end_with(keeper: int) -> None:
    if sys.platform == "linux":
        from autoddp.isolation.kernel.syscalls import die_with_parent, leave_no_core_files

        die_with_parent(signal.SIGKILL, keeper)
        leave_no_core_files()  # of ranks that a trial aborts: they would fill the upper layer, or lie beside the script


def _enter(shelter: Shelter, looks: Callable[[str], None] = lambda path: None) -> None:
    if shelter.level is Level.OVERLAY:
        assert shelter.layers is not None
        enter(shelter.layers, shelter.real, shelter.important, looks)
    elif shelter.landlock:
        from autoddp.isolation.kernel.landlock import restrict_writes

        restrict_writes(shelter.real)


def _close_all_but(*kept: int) -> None:
    """Close all descriptors but these and the first three.

    By one that was opened before the overlay was mounted, the script could write past the overlay.
    """
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
            position, again = os.lseek(0, 0, os.SEEK_CUR), _opened_again(0)
            os.lseek(again, position, os.SEEK_SET)
        elif os.isatty(0):
            # Nobody would answer, because the script's question goes to a log. But scripts ask for the terminal's size.
            again = silent_terminal()
        elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            again = os.open(os.devnull, os.O_RDONLY)  # what is read from a pipe cannot be read again
        else:
            return
    except OSError:
        return  # there is no standard input
    os.dup2(again, 0)
    os.close(again)


def _opened_again(descriptor: int) -> int:
    """A new descriptor of the same file, opened to be read.

    The file is opened by its path in the overlay, if it has one there. By `/dev/stdin` the script can open it to be
    written.
    """
    before = os.fstat(descriptor)
    with contextlib.suppress(OSError):
        again = os.open(os.readlink(f"/proc/self/fd/{descriptor}"), os.O_RDONLY | os.O_NONBLOCK)
        found = os.fstat(again)
        if (found.st_size, found.st_mtime_ns, found.st_mode) == (before.st_size, before.st_mtime_ns, before.st_mode):
            return again
        os.close(again)
    return os.open(f"/dev/fd/{descriptor}", os.O_RDONLY)


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
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="surrogateescape") as file:
        for line in set(file.read().split("\n")):
            number, _, name = line.partition(" ")
            place = os.path.join("/dev/shm", name)
            with contextlib.suppress(OSError):
                found = os.lstat(place)
                # Another program may have taken the name since; the inode's number is then another one.
                same = str(found.st_ino) == number and stat.S_ISREG(found.st_mode)
                if name and "/" not in name and same and found.st_uid == os.geteuid():
                    os.unlink(place)
    with contextlib.suppress(OSError):
        os.unlink(path)
