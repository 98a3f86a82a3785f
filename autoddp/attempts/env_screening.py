"""A short benchmark of environment variables: which of them can gain, before any costs a start of the user's script.

Each setting gets a small job of our own while the tuning job waits between two steps. The jobs meet where the user's
job meets: the launcher that leads tells the others to start their parts of each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autoddp.bench.burst import Burst
from autoddp.files import append
from autoddp.hosts.together import Hosts
from autoddp.knobs import Configuration, Value
from autoddp.log import get_logger
from autoddp.timing import median
from autoddp.torchrun.options import meeting_words
from autoddp.torchrun.surroundings import for_own_workers
from autoddp.wire import JobFacts

logger = get_logger(__name__)

_TORCHRUN = "autoddp.torchrun.own_torchrun"
_MODULE = "autoddp.worker.bench.burst"
_PATIENCE = 120.0  # seconds for one setting, its start included
_ENDING = 30.0  # seconds that elastic has for stopping its workers


@dataclass(frozen=True)
class _Part:
    """What each launcher does for one job."""

    burst: Burst
    variables: dict[str, str]
    """Variables for the job's processes, beside those that all jobs have."""


@dataclass
class Screening:
    """`screening(facts, settings)`: how many times as fast the reduction of a step's gradients is with each setting."""

    torchrun: argparse.Namespace
    folder: Path
    environment: Mapping[str, str]
    """The workers' environment, without what tuning adds."""
    hosts: Hosts = field(default_factory=Hosts)
    _running: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _stopped: bool = field(default=False, init=False)
    _starting: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Held while a job is started, and while that is forbidden."""
    _number: int = field(default=0, init=False)

    def __call__(self, facts: JobFacts, settings: Sequence[Mapping[str, Value]]) -> list[float]:
        """See `env_trials.Screen`: 0.0 for a setting whose job fails, nothing where even the present settings fail."""
        burst = Burst.of_step(facts.gradient_bytes, facts.backend)
        before = self._seconds(burst, {})
        if not before:
            return []
        found = [self._seconds(burst, Configuration(setting).start_variables) for setting in settings]
        now = median([*before, *self._seconds(burst, {})])  # again, because others may use the network too
        return [now / median(seconds) if seconds else 0.0 for seconds in found]

    def stop(self) -> None:
        """End the job that runs; none is started from here on. May be called by any thread."""
        with self._starting:
            self._stopped = True
        if self._running is not None:
            self._end(self._running)

    def follow(self, over: Callable[[], bool]) -> None:
        """Start the parts that the launcher that leads asks for, until tuning is `over()`."""
        while (part := self.hosts.await_told(f"screening/{self._number + 1}", _Part, over)) is not None:
            self._start(part)

    def _seconds(self, burst: Burst, variables: Mapping[str, str]) -> list[float]:
        """One value for each burst; empty for a job that failed or hung."""
        part = _Part(burst, dict(variables))
        self.hosts.tell(f"screening/{self._number + 1}", part)
        place = self._start(part)
        try:
            plain: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            logger.info("no result with %s; see %s", dict(variables), self.folder)
            return []
        return list(plain["seconds"])

    def _start(self, part: _Part) -> Path:
        """Start this host's part of the next job, and wait for its end; the file that has the times."""
        self._number += 1
        self.folder.mkdir(mode=0o700, exist_ok=True)
        place = self.folder / f"{self._number}.json"
        environment = {**self.environment, **part.variables, **for_own_workers(self.environment)}
        words = [*meeting_words(self.torchrun, f"screening{self._number}"), "--redirects", "3"]
        words += ["--log-dir", str(self.folder), "-m", _MODULE, str(place), json.dumps(asdict(part.burst))]
        self._run([sys.executable, "-m", _TORCHRUN, *words], environment)
        return place

    def _run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        append(self.folder / "launcher.log", "")
        with self._starting, open(self.folder / "launcher.log", "ab") as log:
            if self._stopped:
                return
            # In a session of its own, so that Ctrl-C reaches only the launcher, which ends this job.
            running = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            self._running = running
        try:
            running.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._end(running)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            # For a while alone, also after SIGKILL: a process that looks at a dead file system cannot be killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                process.wait(_ENDING)
                return
