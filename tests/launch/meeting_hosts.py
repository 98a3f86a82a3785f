"""Launchers that only meet, on hosts of a lab, without a start of Python and torch for each: they are forked.

    with Meetings() as meetings:
        hosts = meetings.hold(lab, lambda host: ["--nnodes", "2", ...])     # one result for each host
        hosts[0].address

The process that forks them has one thread, so its children may enter the hosts' namespaces.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
from forks import enter_host
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from autoddp.errors import AutoddpError
from autoddp.hosts import agreement
from autoddp.network import clock as hosts_clock
from autoddp.network import gathering
from autoddp.torchrun import meetings, options

PATIENCE = 150  # seconds; a meeting takes 1 to 7
UNSET = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "AUTODDP_VERBOSE")
PATHS = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
PROGRAM = f"import sys; sys.path[:0] = {PATHS}; import meeting_hosts; meeting_hosts.serve()"


@dataclass
class Host:
    """What one launcher came to."""

    error: str = ""
    said: list[str] = field(default_factory=list)
    seconds: float = 0.0
    address: str = ""
    local_addr: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """For the workers."""
    ahead: float = 0.0
    """Seconds by which it knows its clock to be ahead of the first host's."""


class Meetings:
    """Holds the forking process; a result that does not come within `limit` seconds is a failure of the test."""

    def __init__(self) -> None:
        from launchers import environment  # imports pytest, which the launchers do without

        env = {name: value for name, value in environment().items() if name not in UNSET}
        orders, results = os.pipe(), os.pipe()
        with open(orders[0], "rb") as stdin, open(results[1], "wb") as stdout:
            self._process = forks.popen(["-c", PROGRAM], env=env, stdin=stdin, stdout=stdout)
        self._orders = os.fdopen(orders[1], "wb", buffering=0)
        self._results = os.fdopen(results[0], "rb", buffering=0)

    def __enter__(self) -> Meetings:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        self._orders.close()
        self._results.close()

    def hold(
        self,
        lab: Any,
        words: Callable[[int], Sequence[str]],
        env: Callable[[int], Mapping[str, str]] = lambda host: {},
        plan: Callable[[int], str] = lambda host: "the same",
        **planted: Sequence[Any],
    ) -> list[Host]:
        """One launcher on each host. `planted` has, for each host, what it takes for its own version or clock; a file
        that it makes when it says a word or ends, or one that it waits for before it comes or while it is stopped."""
        for host in range(len(lab)):
            order = {
                "host": host,
                "namespaces": lab.holder(host),
                "words": list(words(host)),
                "env": dict(env(host)),
                "plan": plan(host),
                "planted": {name: values[host] for name, values in planted.items()},
            }
            self._orders.write(json.dumps(order).encode() + b"\n")
        found: dict[int, Host] = {}
        while len(found) < len(lab):
            ready, _, _ = select.select([self._results], [], [], PATIENCE)
            assert ready, f"waited {PATIENCE} s for the launchers of all hosts; {found} came to an end"
            line = self._results.readline()
            assert line, "the launchers have ended"
            result = json.loads(line)
            number = result.pop("host")
            found[number] = Host(**result)
        return [found[host] for host in range(len(lab))]


def meet(order: dict[str, Any]) -> Host:
    """In a forked process: enter the host, plant what is asked for, and meet the others."""
    enter_host(order["namespaces"])
    os.environ.update(order["env"])
    host, began, planted, clock = Host(), time.monotonic(), order["planted"], time.time

    def tell(text: str) -> None:
        host.said.append(f"{time.monotonic() - began:.1f} s: {text}")
        if planted.get("says"):
            Path(planted["says"]).touch()

    agreement.tell = meetings.tell = tell

    def frozen() -> float:
        waits = f"while [ ! -e {planted['frozen_until']} ]; do sleep 0.1; done; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", waits])
        os.kill(os.getpid(), signal.SIGSTOP)
        return clock()

    agreement.torch_version = lambda: str(planted.get("torch", "2.13.0"))
    agreement._SILENT, agreement._ANSWER = planted.get("silent", (agreement._SILENT, agreement._ANSWER))
    agreement.__version__ = planted.get("autoddp", "1.0")
    set_clock(clock, planted.get("ahead", 0.0))
    if planted.get("frozen_until"):  # the clock is read when the others know this host's name
        agreement.time = SimpleNamespace(time=frozen)
    if "gathering" in planted:
        gathering._GATHERING = gathering._ARRIVED = planted["gathering"]
    while planted.get("after") and not Path(planted["after"]).exists():
        time.sleep(0.05)
    torchrun = options.torchrun_parser().parse_args([*order["words"], "train.py"])
    try:
        met = agreement.agree(torchrun, order["plan"], f"plan {order['plan']}")
        host.address, host.variables, host.ahead = met.network.address, met.network.variables, met.hosts.ahead
    except AutoddpError as error:
        host.error = str(error)
    if planted.get("ends"):
        Path(planted["ends"]).touch()
    host.seconds, host.local_addr = time.monotonic() - began, torchrun.local_addr
    return host


def set_clock(clock: Callable[[], float], ahead: float) -> None:
    """Let autoddp and torch's rendezvous see a clock that is so many seconds ahead."""
    agreement.time = hosts_clock.time = SimpleNamespace(time=lambda: clock() + ahead)

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(seconds=ahead)

        @classmethod
        def utcnow(cls) -> datetime:  # older versions of torch
            return datetime.utcnow() + timedelta(seconds=ahead)

    dynamic_rendezvous.datetime = Ahead


def serve() -> None:
    options.load_torchrun()
    importlib.import_module("psutil")  # so that no launcher has to do it
    inspect.stack()  # torch asks each launcher for it: Python looks up the file of each module for its first answer
    gc.freeze()  # what was imported is no garbage
    results = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork():
            continue
        # The result is told when the process that has met is gone: a next meeting may use its port again.
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                host = meet(order)
            except BaseException:
                host = Host(error=traceback.format_exc())
            os.write(write, (json.dumps({"host": order["host"], **vars(host)}) + "\n").encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as result:
            said = result.read()
        os.waitpid(pid, 0)
        os.write(results, said)
        os._exit(0)
