"""The launchers of several hosts gather at the job's endpoint: who waits for whom, and why one cannot come.

torchrun prints nothing while it waits there. These lines come within five seconds, and none of them ends the wait
before torchrun would: a name may not be known yet, and the host with the endpoint may start last.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from autoddp.errors import UsageError, first_line
from autoddp.network.clock import Clock
from autoddp.network.interface_probe import why_not_connected
from autoddp.processes.polling import Asked
from autoddp.processes.silence import awaiting
from autoddp.units import duration

_CONNECTING = 1.5  # seconds for one address
_FIRST = 0.2  # seconds in which a program that speaks first, or closes the connection, does so
_ATTEMPT = 3.5  # seconds for one attempt, including the name service
_SOON = 2.5  # seconds without an answer before the user is told why
_PAUSE = 0.2  # seconds between two attempts
_ARRIVED = 6.0  # seconds of waiting for other hosts before the user is told which have arrived, and between two looks
_GATHERING = 10.0  # seconds for what another host, or the network, should have done
_LONG = 1 << 14  # characters: several packets, of the usual size and of jumbo frames
_MENDS = "start the host that has this address, open the port there, or correct the option on this host"
_MUTE = (
    "connections are accepted there, but no launcher has answered yet (another program may have this port, or the name "
    "service is slow)"
)
_BY_TORCHRUN = "a host has come with torchrun, or with --trials 0: start the same command of autoddp on all hosts"

VANISH = (
    "long messages from or to {} get lost (a switch or a tunnel may carry smaller packets than the hosts send: compare "
    "the MTUs, which `ip link` shows)"
)
"""What is said of hosts, by name, between which short messages arrive and long ones do not."""

T = TypeVar("T")


@dataclass(frozen=True)
class Endpoint:
    """Host and port at which the hosts meet."""

    option: str
    """The option that names it, such as `--master-addr`."""
    host: str
    port: int

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def wait_for_answer(endpoint: Endpoint, limit: float, say: Callable[[str], None], connect: Callable[[], T]) -> T:
    """What `connect` makes: a store of torch's at the endpoint. UsageError, with the cause, after `limit` seconds.

    A thread makes it, because torch waits for ever, and heeds no signal, where a program accepts connections and says
    nothing.
    """
    told = _Told()
    with awaiting(told.again):
        return _answered(endpoint, limit, say, connect, told)


@dataclass
class _Told:
    """What the user was told last."""

    line: str = ""

    def again(self) -> str:
        """The line for a wait that goes on."""
        return f"still {self.line}" if self.line else "waiting for the other hosts"


def _answered(endpoint: Endpoint, limit: float, say: Callable[[str], None], connect: Callable[[], T], told: _Told) -> T:
    began, reason, said = time.monotonic(), "", set[str]()
    nameless = f"the name service says nothing of {endpoint.host}"
    asked: Asked[T] | None = None
    while True:
        why = ""
        if asked is None and not (why := _within(_ATTEMPT, lambda: _unreachable(endpoint), nameless)):
            asked = Asked(connect)
        if asked is not None:
            try:
                return asked.answer(_PAUSE)
            except queue.Empty:
                why = _MUTE if asked.seconds > _GATHERING else reason
            except UsageError as error:
                asked, why = None, first_line(error.__cause__ or error)
        here = f"{endpoint.option} {endpoint} from this host ({socket.gethostname()}): {why}"
        waited = time.monotonic() - began
        if waited > limit and (asked is None or asked.seconds > _GATHERING):
            raise UsageError(f"the hosts cannot meet at {here}, for {duration(waited)}: {_MENDS}")
        if waited > _SOON and why != reason:
            reason, told.line = why, f"waiting at {here}; trying for {duration(limit)}: {_MENDS}"
            if why not in said:  # of a host that is off, the network says by turns that it is not there, and nothing
                said.add(why)
                say(told.line)
        if asked is None:
            time.sleep(_PAUSE)


def say_if_not_ours(endpoint: Endpoint, ours: set[str], say: Callable[[str], None]) -> None:
    """On the host that has to have the endpoint: warn if the endpoint is at none of its addresses, `ours`.

    It is no error, because a router may translate addresses.
    """
    nothing: list[str] = []
    found = _within(_ATTEMPT, lambda: _addresses(endpoint), nothing)
    if any(address in ours or address.startswith("127.") or address == "::1" for address in found):
        return
    why = f"that is no address of this host, which has {', '.join(sorted(ours)) or 'none'}"
    why = why if found else f"the name {endpoint.host} does not resolve here"
    this = f"the host with --node-rank 0 is this one ({socket.gethostname()})"
    say(f"warning: {endpoint.option} {endpoint}: {this}, but {why}")


class Arrivals:
    """Who has come to the endpoint. Each host sets a key in `board`, a store of torch's that all hosts share.

    `nodes`: the fewest and the most hosts. If the fewest have not come after `patience` seconds, this host gives up;
    once they have come, others may come for `last_call` seconds. `connect` makes another connection to the board: it
    finds out whether long messages get through. `is_here`: whether this host keeps the board; a name may stand for
    another host on each of them, and then all do.
    """

    def __init__(
        self,
        board: Any,
        endpoint: Endpoint,
        run_id: str,
        nodes: tuple[int, int],
        last_call: float,
        patience: float,
        connect: Callable[[], Any],
        is_here: bool = False,
    ) -> None:
        self._board, self._endpoint, self._run_id, self._nodes = board, endpoint, run_id, nodes
        self._last_call, self._patience, self._is_here = last_call, patience, is_here
        self._at = f"{endpoint}, which is this host" if is_here and not _is_address(endpoint.host) else f"{endpoint}"
        with contextlib.suppress(RuntimeError):  # it is for messages only; the meeting itself reports what is wrong
            number = board.add("arrived", 1)
            board.set(f"arrived/{number}", json.dumps([run_id, socket.gethostname()]))
            looks = threading.Thread(target=self._send_long, args=(number, connect), name="autoddp-long", daemon=True)
            looks.start()

    def _send_long(self, number: int, connect: Callable[[], Any]) -> None:
        """Send a long message to the board and read it, and leave a key there while it is stuck.

        Where a network carries smaller packets than the hosts send, connections and short messages succeed, and long
        ones vanish. A connection with such a message takes no other one, so this is one of its own.
        """
        key, stuck = f"long/{number}", f"stuck/{number}"

        def there_and_back() -> None:
            other = connect()
            other.set(key, "-" * _LONG)
            other.get(key)
            other.delete_key(key)

        asked = Asked(there_and_back)
        with contextlib.suppress(RuntimeError, UsageError):
            try:
                asked.answer(_GATHERING / 2)
            except queue.Empty:
                self._board.set(stuck, "")
                asked.answer(threading.TIMEOUT_MAX)
                self._board.delete_key(stuck)

    def so_far(self, goes_on: bool = False) -> str:
        """How many hosts have arrived, and which; "" where the store does not answer.

        `goes_on`: whether the wait for them goes on; then also until when.
        """
        try:
            came = range(1, self._board.add("arrived", 0) + 1)
            everybody = [json.loads(self._board.get(f"arrived/{number}")) for number in came]
            stuck = [self._board.check([f"stuck/{number}"]) for number in came]
            here = [name for run_id, name in everybody if run_id == self._run_id]
            fewest, most = self._nodes
            by_torchrun = len(here) < fewest and self._torchrun_is_there()
        except RuntimeError:
            return ""
        wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        text = f"{len(here)} of {wanted} hosts have arrived at {self._at} ({', '.join(here)})"
        text += f"; the wait ends after {duration(self._patience)}" if goes_on and len(here) < fewest else ""
        if goes_on and len(here) >= most:
            text += "; a launcher that has ended since is counted too: look at each of them"
        if fewest <= len(here) < most:
            text += f"; others may come for {duration(self._last_call)}"
        others = [f"{name} ({run_id})" for run_id, name in everybody if run_id != self._run_id]
        text += f"; under another --rdzv-id: {', '.join(others)}" if others else ""
        text += f"; {_BY_TORCHRUN}" if by_torchrun else ""
        unheard = [name for (_, name), is_stuck in zip(everybody, stuck, strict=True) if is_stuck]
        return text + (f"; {VANISH.format(', '.join(unheard))}" if unheard else "")

    def _torchrun_is_there(self) -> bool:
        """Whether torchrun's own agent has come: it meets by other keys of the store, and waits in vain, too.

        The keys are those of torch.distributed.elastic: of its c10d rendezvous, and of an agent under a static one. If
        a later torch names them otherwise, only this hint is missing.
        """
        if not (self._is_here or Clock(self._board).was_shown):
            return True  # it keeps the store
        store = getattr(self._board, "underlying_store", self._board)
        static = [f"{self._run_id}/torchelastic/role_info/{node}" for node in range(self._nodes[1])]
        return any(store.check([key]) for key in (f"torch.rendezvous.{self._run_id}", *static))

    @contextlib.contextmanager
    def told(self, say: Callable[[str], None]) -> Iterator[None]:
        """While the body waits for the others, say who has arrived: after some seconds, and after each change."""
        over, told = threading.Event(), _Told()

        def watch() -> None:
            while not over.wait(_ARRIVED):
                silent = f"{self._endpoint} does not answer: the link to it may be down"
                text = _within(_GATHERING, lambda: self.so_far(goes_on=True), silent)
                if text and told.line != f"waiting: {text}" and not over.is_set():
                    told.line = f"waiting: {text}"
                    say(told.line)

        threading.Thread(target=watch, name="autoddp-arrivals", daemon=True).start()
        try:
            with awaiting(told.again):
                yield
        finally:
            over.set()


def _unreachable(endpoint: Endpoint) -> str:
    """Why the endpoint accepts no connection; "" if it does."""
    addresses = _addresses(endpoint)
    if not addresses:
        return f"the name {endpoint.host} does not resolve"
    causes = []
    for address in addresses:
        try:
            with socket.create_connection((address, endpoint.port), timeout=_CONNECTING) as connected:
                stranger = _why_no_store(connected)
            if not stranger:
                return ""
            causes.append(f"{address}: {stranger}")
        except TimeoutError:
            causes.append(f"{address} does not answer (a firewall, or a wrong address)")
        except OSError as error:
            itself = ", which is this host itself" if _is_here(address) else ""
            causes.append(f"{address}{itself}: {why_not_connected(error)}")
    return "; ".join(causes)


def _why_no_store(connected: socket.socket) -> str:
    """Why the other end is no store of torch's, which speaks when it is asked and never closes; "" if it may be."""
    connected.settimeout(_FIRST)
    try:
        said = connected.recv(1)
    except TimeoutError:
        return ""
    except OSError:
        said = b""
    return "another program answers there" if said else "the connection is closed at once (nobody may be behind it yet)"


def _addresses(endpoint: Endpoint) -> list[str]:
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter for what can be no name, such as a..b
        return []
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def _is_address(host: str) -> bool:
    """Whether it is an IP address, and no name."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _is_here(address: str) -> bool:
    """Whether an address is this host's own: only then can a socket be bound to it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return True
    return False


def _within(seconds: float, ask: Callable[[], T], otherwise: T) -> T:
    """What `ask` returns; `otherwise` if it takes longer. A name service may not answer for a minute."""
    try:
        return Asked(ask).answer(seconds)
    except queue.Empty:
        return otherwise
