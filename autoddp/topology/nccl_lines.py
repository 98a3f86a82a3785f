"""The lines of an NCCL_DEBUG=INFO log: where a message begins, and what one message says.

Several processes may write into one file at once, so that a line can hold the beginnings of several messages. NCCL
writes `host:pid:tid [gpu] NCCL INFO ` before each: what follows the last of them is one process's own words to the line
end. An earlier one was interrupted at a place that cannot be seen; like a cut line it is marked with `…`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from autoddp.topology.text import CUT

# Every repetition is bounded or ends the pattern, and no two can match the same text: linear for any bytes.
_BEGINNING = re.compile(r"[NR]CCL (INFO|WARN|version) ")
_PROCESS = re.compile(r":[0-9]{1,10}:[0-9]{1,10} \[")
_VERSION = re.compile(
    r"([0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\+(?:cuda|hip)[A-Za-z0-9_.]{0,32})(?: HEAD:.*)?"
)  # RCCL's build
_NAME = r"[A-Za-z][A-Za-z0-9_.+-]{0,31}(?: [A-Za-z0-9_.+-]{1,31}){0,3}"
_NETWORK = re.compile(rf"Using network ({_NAME})")
_INITIALISED = re.compile(r"NET/([A-Za-z0-9_]{1,32}) : Using ")
_SIZE = re.compile(r"(?:rank ([0-9]{1,7}) n[rR]anks|comm 0x[0-9a-f]{1,16} nRanks) ([0-9]{1,7})(?= [A-Za-z]|$)")
_WIDEST = 19  # ranks: of a longer ring NCCL may print the first 20 only, without a sign
_RING = re.compile(rf"Channel ([0-9]{{2,3}})/[0-9]{{2,3}} :((?: +[0-9]{{1,2}}){{1,{_WIDEST}}})")

_RANK = r"([0-9]{1,7})(?:\[([0-9a-f]{1,16})\])?"  # in brackets the GPU: its number, once its PCI address
_LOCAL = (
    r"P2P/(?:IPC|CUMEM|MNNVL|direct pointer|common device|indirect/[0-9]{1,7}\[[0-9a-f]{1,16}\])(?:/read)?(?:/CE)?"
    r"|SHM/(?:direct|CE)/(?:direct|CE)|direct shared memory"
)
_NET = rf"NET/{_NAME}/[0-9]{{1,4}}(?:\([0-9]{{1,7}}\))?(?:/GDRDMA(?:\(PCI\))?)?(?:/Shared)?"
_TRANSPORT = re.compile(rf"{_LOCAL}|{_NET}")
# Only what goes over the network names its direction. RCCL adds the communicator.
_CONNECTION = re.compile(
    rf"(?:Channel [0-9]{{2,3}}(?:/[0-9]{{1,3}})?|Ring [0-9]{{2,3}}) : {_RANK} -> {_RANK}"
    rf"(?: via ({_LOCAL})| \[(?:send|receive)\] via ({_NET}))(?: comm 0x.*)?"
)
_VIA = re.compile(r"[0-9\]] via (?!COLLNET)(?:[A-Z0-9]{3}|direct shared)")


class Message(NamedTuple):
    """What one process said on one line."""

    kind: str
    """INFO, WARN or version."""
    text: str
    """Ends in `…` if it may go on, or if the end belongs to another process."""


class Connection(NamedTuple):
    """One channel from one rank to another."""

    source: int
    target: int
    transport: str
    gpus: tuple[str, str]
    """The GPUs of both as NCCL names them: `3`, once the PCI address `8a000`; empty where it names none."""


def messages(line: str) -> Iterator[Message]:
    """The messages that begin on a line, as `text.lines` gives it."""
    _, *parts = _BEGINNING.split(line)
    kinds, texts = parts[::2], parts[1::2]
    for i, (kind, text) in enumerate(zip(kinds, texts, strict=True), start=1):
        yield Message(kind, text if i == len(kinds) else text + CUT)


def connections_shown(line: str) -> int:
    """How many connections the line shows, readable or not."""
    return len(_VIA.findall(line))


def connection(text: str) -> Connection | None:
    """`Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read`, complete to its end and of a known form; else None."""
    match = _CONNECTION.fullmatch(text)
    if match is None or int(match[1]) == int(match[3]):
        return None
    return Connection(int(match[1]), int(match[3]), match[5] or match[6], (match[2] or "", match[4] or ""))


def version(text: str) -> str | None:
    """`2.27.7+cuda13.0`. PyTorch's errors mention a version without CUDA's, and old ones a wrong one."""
    match = _VERSION.fullmatch(text)
    return match[1] if match else None


def network(text: str) -> str | None:
    """`Using network AWS Libfabric`."""
    match = _NETWORK.fullmatch(text)
    return match[1] if match else None


def initialised_network(text: str) -> str | None:
    """`NET/IB : Using [0]mlx5_0:1/IB`: it is there, which does not say that it is used."""
    match = _INITIALISED.match(text)
    return match[1] if match else None


def communicator_size(text: str) -> int | None:
    """`rank 0 nranks 4`, in the messages of several kinds that have it."""
    match = _SIZE.search(text)
    if match is None or (match[1] and int(match[1]) >= int(match[2])):
        return None
    return int(match[2])


def ring(text: str) -> tuple[str, int] | None:
    """Channel and length of `Channel 00/02 :    0   1   2   3`, if it names all ranks below its length."""
    match = _RING.fullmatch(text)
    if match is None:
        return None
    ranks = [int(rank) for rank in match[2].split()]
    return (match[1], len(ranks)) if sorted(ranks) == [*range(len(ranks))] else None


def without_next_process(text: str) -> str:
    """An interrupted message up to the word that runs into the name of the interrupting process.

    >>> without_next_process("Failed to open libibverbs.so[.1]hostA:86:87 [1] …")
    'Failed to open…'
    """
    match = _PROCESS.search(text) if text.endswith(CUT) else None
    return text[: match.start()].rpartition(" ")[0] + CUT if match else text


def is_transport(text: str) -> bool:
    """Whether NCCL prints this behind `via`."""
    return _TRANSPORT.fullmatch(text) is not None
