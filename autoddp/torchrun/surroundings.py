"""What is around torch's code while it runs in our processes: its log, clock, signals, variables."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

from autoddp.files import append
from autoddp.processes.signals import ENDING
from autoddp.processes.silence import awaiting

FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""The workers make a store of their own instead of using their agent's."""
_AGENTS_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
"""Our own workers meet in the agent's store before they make a process group, so rank 0 must not make another one."""
_NO_TRACES = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""When a call of NCCL's fails or hangs, torch writes the last calls to a file in /tmp or ~/.cache/torch. Its name is
the same for all jobs: ours would replace the file of a job of the user's. It takes a minute too until the rank ends."""
_NO_WARNINGS = {"PYTHONWARNINGS": "ignore"}
"""If the user makes warnings errors, that is for the script. torch warns of a barrier over NCCL, and Python (from 3.12
on) of a fork beside numpy's threads: our own workers would end there."""
_NO_OTHER_FILES = {"PYTHONSAFEPATH": "1"}
"""With `-m`, Python looks in the current folder first, where a project may have files with the names of Python's own
modules. From 3.11 on this variable leaves that folder out."""
_ROOT = Path(__file__).resolve().parents[2]
AHEAD = "AUTODDP_CLOCK_AHEAD"
"""Variable that tells our own jobs by how many seconds the clock that they follow is ahead of this host's."""


def for_own_workers(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which our own workers find this package, meet in their agent's store, and leave no files behind.

    They print no warnings, which the user could do nothing about.
    """
    paths = [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**_AGENTS_STORE, **_NO_TRACES, **_NO_WARNINGS, **_NO_OTHER_FILES, "PYTHONPATH": os.pathsep.join(paths)}


def follow_clock(ahead: float) -> None:
    """From here on torch's rendezvous, here and in our own jobs, goes by a clock that is `ahead` seconds ahead.

    Torch compares times that the hosts have written, each by its own clock. Where these differ by 15 seconds it takes
    living hosts for lost.
    """
    os.environ[AHEAD] = str(ahead)
    _follow(ahead)


def _follow(ahead: float) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    module: Any = dynamic_rendezvous
    theirs, difference = module.datetime, timedelta(seconds=ahead)

    class Followed(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return theirs.now(tz) + difference

        @classmethod
        def utcnow(cls) -> Any:  # older versions of torch
            return theirs.utcnow() + difference

    module.datetime = Followed


def follow_clock_as_told() -> None:
    """Go by the clock that the launcher which has started this process goes by, see `follow_clock`."""
    if ahead := float(os.environ.get(AHEAD, "0")):
        _follow(ahead)


def number_host(number: int) -> None:
    """Make torch's rendezvous in this process sort launchers of one address by this number, not by their process ids.

    Two launchers on one machine have new ids in each attempt, so rank 0 might be now one's and now the other's.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    generator: Any = dynamic_rendezvous._NodeDescGenerator
    theirs = generator.generate
    generator.generate = lambda *given, **named: dataclasses.replace(theirs(*given, **named), pid=number)


@contextlib.contextmanager
def waits_told() -> Iterator[None]:
    """While the body runs, say that the agent waits for those of the other hosts, before each start of the ranks.

    It waits in silence, for 10 or 15 minutes: one of them may have been killed since all hosts have met.
    """
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    agent: Any = SimpleElasticAgent
    theirs = agent._rendezvous

    def told(*given: Any) -> None:
        with awaiting("the other hosts to start the job"):
            theirs(*given)

    agent._rendezvous = told
    try:
        yield
    finally:
        agent._rendezvous = theirs


class _Log(logging.FileHandler):
    """A log whose lines are lost on a full disk: logging would print a traceback for each of them."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: the study goes on without the line."""

    def close(self) -> None:
        """Close the file; what could not be written is left out."""
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def quiet_elastic(log: Path | None) -> Iterator[None]:
    """Send elastic's lines to `log`, or nowhere: the user sees them when the real job is started."""
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")
    loggers = [logging.getLogger(name) for name in names]
    loggers += [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(names)]
    before = [(logger, list(logger.handlers), logger.propagate) for logger in loggers]
    if log:
        append(log, "")
    handler: logging.Handler = logging.NullHandler()
    if log:  # a path in a line need not be UTF-8, nor what the locale has: logging would print a traceback
        handler = _Log(log, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
        handler.close()


@contextlib.contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Put the present handlers back: elastic leaves its own, which would raise its exception in our code."""
    present = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in present.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def environment_with(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the workers of one job; afterwards the environment is what it was, to the last variable."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
