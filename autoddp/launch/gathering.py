"""The launchers of several hosts gather at the job's endpoint: who waits, for whom, and why somebody cannot come.

torchrun says nothing while it waits there. These words come within five seconds, and none of them ends the wait before
torchrun would end it: a name may not be known yet, and the host with the endpoint may start last.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autoddp.errors import UsageError
from autoddp.launch.interface_probe import why_not_connected
from autoddp.units import duration

_CONNECTING = 1.5  # seconds for one address
_ATTEMPT = 3.5  # seconds for one attempt, the name service included
_SOON = 2.5  # seconds without an answer before the user is told why
_PAUSE = 0.2  # seconds between two attempts
_GATHERING = 10.0  # seconds of waiting for other hosts before the user is told of whom
_AGAIN = 60.0  # seconds between two looks at who has arrived


@dataclass(frozen=True)
class Endpoint:
    """Where the hosts meet."""

    option: str
    """By which the user named it, such as `--master-addr`."""
    host: str
    port: int

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def wait_for_answer(endpoint: Endpoint, limit: float, say: Callable[[str], None]) -> None:
    """Until somebody listens at the endpoint. UsageError, with the cause, after `limit` seconds."""
    began, told = time.monotonic(), ""
    while why := _within(_ATTEMPT, lambda: _unreachable(endpoint), f"the name service says nothing of {endpoint.host}"):
        here = f"{endpoint.option} {endpoint} from this host ({socket.gethostname()}): {why}"
        waited = time.monotonic() - began
        if waited > limit:
            raise UsageError(
                f"the hosts cannot meet at {here}, for {duration(waited)}: start the host that has this address, open "
                "the port there, or correct the option on this host"
            )
        if waited > _SOON and why != told:
            told = why
            say(f"waiting at {here}; trying for {duration(limit)}")
        time.sleep(_PAUSE)


def say_if_not_ours(endpoint: Endpoint, ours: set[str], say: Callable[[str], None]) -> None:
    """For the host that is to have the endpoint: a line if none of its addresses, `ours`, is the endpoint's.

    It may be right all the same, behind a router that translates addresses.
    """
    found = _within(_ATTEMPT, lambda: _addresses(endpoint), [])
    why = ""
    if not found:
        why = f"the name {endpoint.host} does not resolve here"
    elif not any(address in ours or address.startswith("127.") or address == "::1" for address in found):
        why = f"that is no address of this host, which has {', '.join(sorted(ours)) or 'none'}"
    if why:
        say(
            f"warning: {endpoint.option} {endpoint}: the host with --node-rank 0 is this one ({socket.gethostname()}), "
            f"but {why}"
        )


class Arrivals:
    """Who has come to the endpoint, by `board`: a store of torch's that all hosts share, of which each sets a key."""

    def __init__(self, board: Any, endpoint: Endpoint, run_id: str, nodes: int) -> None:
        self._board = board
        self._endpoint = endpoint
        self._run_id = run_id
        self._nodes = nodes
        with contextlib.suppress(RuntimeError):  # words only: the meeting itself tells what is wrong
            number = board.add("arrived", 1)
            board.set(f"arrived/{number}", json.dumps([run_id, socket.gethostname()]))

    def so_far(self) -> str:
        """Who is here and who is not, in a few words; "" where the store does not answer."""
        try:
            came = range(1, self._board.add("arrived", 0) + 1)
            everybody = [json.loads(self._board.get(f"arrived/{number}")) for number in came]
        except RuntimeError:
            return ""
        here = [name for run_id, name in everybody if run_id == self._run_id]
        text = f"{len(here)} of {self._nodes} hosts have arrived at {self._endpoint} ({', '.join(here)})"
        others = [f"{name} ({run_id})" for run_id, name in everybody if run_id != self._run_id]
        return text + (f"; under another --rdzv-id: {', '.join(others)}" if others else "")

    @contextlib.contextmanager
    def told(self, say: Callable[[str], None]) -> Iterator[None]:
        """While the body waits for the others, say who has come: after some seconds, and where that changes."""
        over = threading.Event()

        def watch() -> None:
            told, pause = "", _GATHERING
            while not over.wait(pause):
                text = self.so_far()
                if text and text != told and not over.is_set():
                    say(f"waiting: {text}")
                told, pause = text, min(pause, _AGAIN)

        thread = threading.Thread(target=watch, name="autoddp-arrivals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()


def _unreachable(endpoint: Endpoint) -> str:
    """ "" or why nobody answers there."""
    addresses = _addresses(endpoint)
    if not addresses:
        return f"the name {endpoint.host} does not resolve"
    causes = []
    for address in addresses:
        try:
            socket.create_connection((address, endpoint.port), timeout=_CONNECTING).close()
            return ""
        except TimeoutError:
            causes.append(f"{address} does not answer (a firewall, or a wrong address)")
        except OSError as error:
            causes.append(f"{address}{_itself(address)}: {why_not_connected(error)}")
    return "; ".join(causes)


def _addresses(endpoint: Endpoint) -> list[str]:
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def _itself(address: str) -> str:
    """Whether an address is this host's own, in words."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return ", which is this host itself"
    return ""


def _within(seconds: float, ask: Callable[[], Any], otherwise: Any) -> Any:
    """What `ask` returns; `otherwise` if it takes longer. A name service may not answer for a minute."""
    answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(ask()), name="autoddp-endpoint", daemon=True).start()
    try:
        return answer.get(timeout=seconds)
    except queue.Empty:
        return otherwise
