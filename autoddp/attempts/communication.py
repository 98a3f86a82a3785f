"""The diagnosis of a script that communicates without DDP: when enough is recorded, and how calls are done again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoddp.codec import decode, encode
from autoddp.diagnose.collectives import (
    SILENCE,
    CommunicationDiagnosis,
    calls_made,
    examined,
    planned,
    recorded,
    steps_of,
    where_ranks_stand,
)
from autoddp.files import append
from autoddp.processes.polling import polls
from autoddp.processes.silence import awaiting
from autoddp.topology import usable_cores
from autoddp.torchrun.surroundings import for_own_workers
from autoddp.units import duration
from autoddp.wire.recorded_calls import TRIAL, WATCH
from autoddp.wire.replayed_calls import Program, Replay, Replayed

_LONG_ENOUGH = 20.0  # seconds from the first call, if calls were made in most of them
_ENOUGH_OF_SHORT_STEPS = 12.0  # seconds, where at least `_MANY` steps fit into them
_MANY = 40
_COUNTED_AFTER = 6.0  # seconds, when steps are counted, once: with eight busy ranks that takes four seconds
_IN_MOST_LOOKS = 20  # looks in which calls were made; there are two in a second
_WATCHED_AFTER = 3  # such looks, after which processes look where results are first used; a script may end soon
_TRIED_AFTER = 4  # such looks, after which it is known whether the ranks have more threads than there are cores
_STILL = 20.0  # seconds in which no rank calls anything, though steps were made: then the ranks hang
_QUIET = 5.0  # seconds without a call, from which a line tells of it
_STEPS_STILL = 3  # times a step, as well
_BEHIND_A_TRIAL = 3.0  # seconds of the script as written again, behind a trial of fewer threads
_MODULE = "autoddp.worker.bench.replay"
_ANSWER = 45.0  # seconds from the command, in which a replay should be over
_LEAST = 8.0  # seconds for it, with all starts of its ranks; where a change may give nothing, twice that
_MOST = 20.0
_PATIENCE = 60.0  # seconds, after which it is ended
_ENDING = 10.0  # seconds in which it must be gone after SIGKILL


@dataclass
class Enough:
    """Whether a script without DDP has been recorded for long enough; asked again and again while it runs.

    A script that builds its model only after some minutes may meet at a barrier before. So what counts is not the time
    from the first call alone: calls must have been made in half of it. It may be less where steps are short, and no
    trial of fewer threads goes on; and it is over where the ranks hang behind some steps. Where they hang
    earlier, their heartbeats tell.
    """

    folder: Path
    clock: Callable[[], float] = time.monotonic
    _made: tuple[int, ...] = field(default=(), init=False)
    _changed: float = field(default=0.0, init=False)
    """When calls were made the last time, by `clock`."""
    _looked: float = field(default=0.0, init=False)
    """When that was looked at the last time: to read what busy ranks have recorded takes seconds."""
    _step: float | None = field(default=None, init=False)
    """Seconds of the steps that were made by then, 0 where there were none; None where that was not looked at since."""
    _began: float | None = field(default=None, init=False)
    _stood: tuple[float, str] = field(default=(-1.0, ""), init=False)
    """`where`, with the `_changed` that it was for."""
    _active: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _not_before: float = field(default=0.0, init=False)
    """A trial of fewer threads, and some seconds behind it, are over then, by `clock`. It may begin late."""

    def __call__(self) -> bool:
        """Look once."""
        made, self._looked = calls_made(self.folder), self.clock()
        if made != self._made:
            self._active += 1
            self._began = self.clock() if self._began is None else self._began
            self._made, self._changed, self._step = made, self._looked, None
            with contextlib.suppress(OSError):  # as on a full disk: what is recorded is an answer without them
                if self._active == _WATCHED_AFTER:
                    (self.folder / WATCH).touch(mode=0o600)
                if self._active == _TRIED_AFTER:
                    self._try_fewer_threads()
        if self._began is None:
            return False
        if self._hangs():
            return True
        if not self._seconds and self.clock() - self._began >= _COUNTED_AFTER:
            self._seconds = self._needed()
        if self._active < _IN_MOST_LOOKS or self.clock() < self._not_before:
            return False
        return 0 < self._seconds <= self.clock() - self._began

    @property
    def in_words(self) -> str:
        """What goes on since the first call; "" before it."""
        if self._began is None:
            return ""
        still = self._looked - self._changed
        silent = f"; no rank has called anything for {duration(still)}" if still > _QUIET else ""
        return f"recording what the script communicates, {duration(self.clock() - self._began)} so far{silent}"

    @property
    def where(self) -> str:
        """The calls in which the ranks stand, once no rank has called anything for a while; "" before."""
        changed = self._changed
        if self._began is None or self._looked - changed < SILENCE:
            return ""
        if self._stood[0] != changed:  # a terminal asks several times in a second, and to read it takes a while
            self._stood = changed, where_ranks_stand(recorded(self.folder))
        return self._stood[1]

    @property
    def has_steps(self) -> bool:
        """Whether steps are recorded: a script that will build a DDP model may have called something before, too."""
        return self._began is not None and self._seconds_of_a_step() > 0

    def _hangs(self) -> bool:
        """Before the first step a script may well be busy for minutes with its data; and a step may take long."""
        still = self._looked - self._changed
        return still >= _STILL and 0 < self._seconds_of_a_step() <= still / _STEPS_STILL

    def _seconds_of_a_step(self) -> float:
        """Seconds of a step; 0 where none is known. Calls that repeat for a moment may send weights at the start."""
        if self._step is None:
            recording = recorded(self.folder)
            self._step = 0.0
            if recording.is_there:
                steps = steps_of(recording)
                is_known = steps.unit != "second" and (not steps.period or self._active >= _IN_MOST_LOOKS // 2)
                self._step = max(1e-9, steps.seconds) if is_known else 0.0
        return self._step

    def _needed(self) -> float:
        """Seconds of recording that this script needs, by what was recorded so far."""
        recording = recorded(self.folder)
        if not recording.is_there:
            return _LONG_ENOUGH
        steps = steps_of(recording)
        are_many = steps.unit != "second" and _MANY * steps.seconds <= _ENOUGH_OF_SHORT_STEPS
        # Ranks that train apart may average their weights in every 500th step only.
        repeats = any(place.group is not None for place in recording.often)
        return _ENOUGH_OF_SHORT_STEPS if are_many and repeats else _LONG_ENOUGH

    def _try_fewer_threads(self) -> None:
        recording, now = recorded(self.folder), time.perf_counter()
        trial = planned(recording, usable_cores(), now)
        if trial is not None:
            new = self.folder / f"{TRIAL}.new"
            new.write_text(encode(trial), encoding="utf-8")
            new.rename(self.folder / TRIAL)
            self._not_before = self.clock() + trial.ends - now + _BEHIND_A_TRIAL


def diagnosed(
    folder: Path,
    place: Path,
    environment: Mapping[str, str],
    budget: float,
    say: Callable[[str], None],
    rates: Mapping[str, float],
    until: float = 0.0,
    *,
    since: float,
    over: Callable[[], str],
) -> CommunicationDiagnosis | None:
    """What the processes of an attempt have recorded in `folder`, and why it takes so long; None if they have nothing.

    The attempt has ended. `place`: a folder for the files of the replay, which is made. `budget`: seconds that the
    replay may take, see `Replay.seconds`. `since`: when the command was given, by `time.monotonic()`; the replay takes
    what is left of a minute. `rates`: interface → Gbit/s to the next host. `until`: when the script was ended or has
    failed, by `time.perf_counter()`; 0 where it has come to its end by itself, so that none of its ranks hang.
    `over()`: why a replay must end now; "" as long as it may go on.
    """
    recording = recorded(folder)
    if not recording.is_there:
        return None
    threads = max(one.threads for one in recording.processes)
    backend = "nccl" if recording.uses_nccl else "gloo"

    def replay(programs: dict[str, Program]) -> Replayed | str:
        ranks = len(next(iter(programs.values())).acts)
        if any(rank not in recording.of_rank for rank in range(ranks)):
            return "not all ranks were recorded on this host"
        left = min(_MOST, max(_LEAST, since + _ANSWER - time.monotonic()))
        return replayed(Replay(programs, ranks, threads, backend, min(budget, left)), place, environment, over)

    last = max((call.began for one in recording.processes for call in one.calls), default=until)
    return examined(recording, usable_cores(), replay, say, rates, still=until - last)


def replayed(plan: Replay, place: Path, environment: Mapping[str, str], over: Callable[[], str]) -> Replayed | str:
    """Do what the plan says; how long each program took, or why it failed. `over`: see `diagnosed`."""
    if over():
        return f"it was not done again: {over()}"
    result, why = place / "result.json", f"doing the calls again failed; see {place / 'log'}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        (place / "plan.json").write_text(encode(plan), encoding="utf-8")
        append(place / "log", "")
    except OSError as error:  # as on a full disk: what was recorded is an answer without it
        return f"{place} cannot be written ({error.strerror})"
    command = [sys.executable, "-m", _MODULE, str(place / "plan.json"), str(result)]
    with open(place / "log", "ab") as log:
        # In a session of its own, so that Ctrl-C reaches only the launcher, which ends it.
        running = subprocess.Popen(
            command,
            env={**environment, **for_own_workers(environment)},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with awaiting("the end of the calls that are done again"):
                for _ in polls(_PATIENCE):
                    if over() or running.poll() is not None:
                        break
                else:
                    why = f"doing the calls again took more than {_PATIENCE:.0f} s"
        finally:
            if running.poll() is None:
                _end(running)
        why = over() or why
    try:  # what the starts before have found is an answer without the last one, as the replay fails with it
        return decode(result.read_text(encoding="utf-8"), Replayed)
    except (OSError, ValueError):
        return why


def _end(running: subprocess.Popen[bytes]) -> None:
    """End the replay. Its ranks, which have sessions of their own, end with it: the kernel sees to that."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # what looks at a dead file system cannot be killed
        running.wait(_ENDING)
