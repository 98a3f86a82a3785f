"""Watches what all programs of an attempt do, by the kernel: the keeper answers before a held system call goes on.

    watch = ProgramWatch(plan)        # in the keeper, before the fork
    watch.hold()                      # in the attempt's first process: from here on its calls, and its children's, wait
    watch.begin(child)                # in the keeper, whenever one of `watch.awaited` can be read:
    watch.answer()
    watch.look(descendants)           # and now and then

Where the kernel cannot hold calls (before Linux 5.5, processors other than x86-64 and ARM64), or shows nobody what they
are for, programs are judged when they are started in Python, see `unwatched`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from autoddp.isolation import Level
from autoddp.isolation.children import VARIABLE, mark_as_checked
from autoddp.isolation.elsewhere.blocked import waits_at
from autoddp.isolation.elsewhere.known import program_of
from autoddp.isolation.elsewhere.own import count_below
from autoddp.isolation.elsewhere.processes import go_on_after_signals
from autoddp.isolation.elsewhere.system_calls import judge_call
from autoddp.isolation.elsewhere.unwatched import judge_unwatched
from autoddp.isolation.kernel.seccomp import HeldCall, hold_calls, let_go, next_held
from autoddp.isolation.kernel.syscalls import die_with_parent
from autoddp.isolation.pipes import OTHERS, Pipes
from autoddp.isolation.plan import IsolationPlan
from autoddp.isolation.stopping import connected, request, stopper

_LOOKS = 5.0  # seconds between two looks at what programs wait for


def _memory_can_be_read() -> bool:
    """Whether the kernel lets a process read the memory of one that it has started: some hosts forbid it (Yama)."""
    own = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(signal.SIGKILL, own)
        while True:
            signal.pause()
    try:
        os.close(os.open(f"/proc/{child}/mem", os.O_RDONLY))
        return True
    except OSError:
        return False
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class ProgramWatch:
    """Both ends of the watch over one attempt."""

    def __init__(self, plan: str) -> None:
        """`plan`: the text of the attempt's `IsolationPlan`; "" where none was made."""
        self._plan = plan
        self._ours, self._theirs = socket.socketpair()
        self._listener = -1
        self._root = 0
        """The attempt's first process."""
        self._pipes: Pipes | None = None
        self._looked = 0.0

    def fileno(self) -> int:
        """The descriptor that the attempt must leave open until `hold`."""
        return self._theirs.fileno()

    def hold(self) -> bool:
        """Have the system calls of this process, and of all that it starts, held for the keeper.

        False where the kernel cannot: then programs are judged by those who start them, see `unwatched`.
        """
        # Without the mark each Python would count as a program that nobody knows.
        held = mark_as_checked() and _memory_can_be_read()
        try:
            listener = hold_calls() if held else -1
        except OSError:
            held = False
        began = time.time()  # by now the overlay has made its copies of the pipes of others
        socket.send_fds(self._theirs, [str(began).encode()], [listener] if held else [])
        if self._plan:
            plan = replace(IsolationPlan.parse(self._plan), programs_are_watched=held, began=began)
            os.environ[VARIABLE] = plan.text()
        if held:
            os.close(listener)
            go_on_after_signals()
        self._theirs.close()
        return held

    def judge_ranks(self, words: Sequence[str]) -> None:
        """End tuning if ranks that are no Python, but start with these words, may change something outside the run.

        Elastic starts them, and judges nothing.
        """
        if words and (why := judge_unwatched(words, os.environ)):
            stopper(IsolationPlan.parse(self._plan).socket)(why)

    def begin(self, root: int) -> None:
        """Watch the attempt whose first process this is."""
        self._root = root
        self._theirs.close()
        count_below(os.getpid(), IsolationPlan.parse(self._plan).socket if self._plan else "")

    @property
    def awaited(self) -> list[socket.socket | int]:
        """What can be read when there is something to answer."""
        if self._listener >= 0:
            return [self._listener]
        return [self._ours] if self._ours.fileno() >= 0 else []

    def answer(self) -> None:
        """Let the next call go on, or ask the launcher to end tuning: that call then waits for its process's end."""
        if self._listener < 0:
            began, descriptors, _, _ = socket.recv_fds(self._ours, 64, 1)
            self._ours.close()
            if began and self._plan and IsolationPlan.parse(self._plan).level is Level.OVERLAY:
                self._pipes = Pipes(float(began))
            self._listener = descriptors[0] if descriptors else -1
            return
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        events = sum(event for _, event in poll.poll(0))
        if not events & select.POLLIN:  # a signal has interrupted it
            if events & select.POLLHUP:  # no process is left that could call
                os.close(self._listener)
                self._listener = -1
            return
        held = next_held(self._listener)
        if held is None:
            return
        if said := self._judged(held):
            self._stop(said)
        else:
            let_go(self._listener, held)

    def look(self, processes: Callable[[], list[int]]) -> None:
        """Ask the launcher to end tuning if a program waits at a named pipe of others: under the overlay, for ever.

        `processes` lists those of the attempt, and is called every few seconds at most.
        """
        now = time.monotonic()
        pipes = self._pipes
        if pipes is None or now - self._looked < _LOOKS:
            return
        self._looked = now
        for process in processes():
            with contextlib.suppress(OSError, ValueError):  # it has ended, or goes on by now
                if path := waits_at(process, pipes.are_others):
                    self._stop(f"{program_of(process)} opens {path}, {OTHERS}")
                    self._pipes = None  # one word of it is enough
                    return

    def close(self) -> None:
        """Close what is left, once the attempt's processes have ended."""
        self._ours.close()
        if self._listener >= 0:
            os.close(self._listener)

    def _stop(self, reason: str) -> None:
        try:
            with connected(IsolationPlan.parse(self._plan).socket) as connection:
                connection.send_bytes(request(reason))
        except OSError:  # nobody hears it: without an end of the attempt the held call would wait for ever
            os.kill(self._root, signal.SIGKILL)

    def _judged(self, held: HeldCall) -> str:
        try:
            return judge_call(held)
        except PermissionError:
            # Some kernels let nobody look at another process: then nothing is known of any program.
            with contextlib.suppress(OSError):
                os.listdir(f"/proc/{self._root}/fd")
                return f"autoddp may not look at what {program_of(held.thread)} sends ({held.name})"
            return ""
        except OSError:  # it has ended, or the words are where no memory is: the kernel refuses the call
            return ""
        except Exception as error:  # the keeper would end by it, and nobody would answer any more
            with contextlib.suppress(OSError):
                does = f"{held.name}, {type(error).__name__}"
                return f"autoddp cannot tell what {program_of(held.thread)} does ({does})"
            return ""
