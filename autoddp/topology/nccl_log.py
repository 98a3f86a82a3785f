"""What NCCL says it does: the log of a job that ran with NCCL_DEBUG=INFO.

log = read_nccl_log(Path("job.log").read_text(errors="replace"))
log.network                 # 'IB'
log.transports["7->8"]      # ('NET/IB/1/GDRDMA',)
log.missing                 # (), or sentences about what could not be read
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from autoddp.topology.nccl_lines import (
    Message,
    communicator_size,
    connection,
    connections_shown,
    initialised_network,
    is_transport,
    messages,
    network,
    ring,
    version,
    without_next_process,
)
from autoddp.topology.text import lines, not_read, nothing_readable

_NAMES = 4  # as many things of a kind are named in a sentence, the others counted
_LONGEST_WARNING = 500  # characters; NCCL's own buffer has 1024


@dataclass(frozen=True)
class NcclLog:
    """What the log says for certain, of all its processes and communicators together.

    >>> log = read_nccl_log("h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\\nh:1:2 [0] NCCL INFO Using n")
    >>> log.transports, log.network
    ({'0->1': ('P2P/IPC',)}, None)

    Not promised: that a pair without a transport has none. Each process tells only of its own connections, NCCL makes
    some of them when they are first used, and ranks count from 0 in every communicator.
    """

    nccl_version: str | None
    """`2.27.7+cuda13.0`; None if the log does not say it, or names several."""
    network: str | None
    """`IB`, `Socket` or the name of a plugin: what NCCL initialised, though maybe no connection uses it."""
    nranks: int | None
    """Ranks of the largest communicator."""
    transports: dict[str, tuple[str, ...]]
    """`0->1`, ranks, → what NCCL prints behind `via`, each once."""
    warn_lines: int
    """How many warnings there are."""
    warnings: tuple[str, ...] = ()
    """Their texts, each once."""
    missing: tuple[str, ...] = ()
    """What could not be read of connections, or contradicts itself; a sentence for each kind."""
    within_node: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """Two GPUs as NCCL names them, by number (`3`) or once by PCI address (`8a000`), → what goes not over a network."""

    @property
    def transport_class_by_pair(self) -> dict[str, tuple[str, ...]]:
        """`0->1` → P2P, SHM, NET: more than one if communicators or channels differ."""
        return {
            pair: tuple(sorted({transport_kind(text).partition("/")[0] for text in texts}))
            for pair, texts in self.transports.items()
        }

    @property
    def transport_classes(self) -> tuple[str, ...]:
        """Those of all pairs."""
        return tuple(sorted({name for names in self.transport_class_by_pair.values() for name in names}))

    @property
    def gdrdma(self) -> bool | None:
        """Whether any connection uses GPUDirect RDMA; None if there is no connection to tell it from."""
        if not self.transports:
            return None
        return any("/GDRDMA" in text for texts in self.transports.values() for text in texts)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "nccl_version": self.nccl_version,
            "network": self.network,
            "nranks": self.nranks,
            "transport_classes": list(self.transport_classes),
            "transports": {pair: list(texts) for pair, texts in self.transports.items()},
            "transport_class_by_pair": {pair: list(names) for pair, names in self.transport_class_by_pair.items()},
            "gdrdma": self.gdrdma,
            "warn_lines": self.warn_lines,
            "warnings": list(self.warnings),
            "missing": list(self.missing),
        }


def read_nccl_log(log: str | Iterable[str]) -> NcclLog:
    """All that is certain of a log, given as one text or line by line, as an open file gives it.

    Anything may stand between NCCL's lines. NothingReadable if there is none of them.
    """
    said = _Said()
    for number, line in enumerate(_lines([log] if isinstance(log, str) else log), start=1):
        said.take(number, line)
    if not said.anything:
        raise nothing_readable(
            "the log of a run with NCCL_DEBUG=INFO, with lines like `host:42:57 [0] NCCL INFO Using network IB`"
        )
    return said.together()


def transport_kind(text: str) -> str:
    """P2P, SHM, NET/IB, NET/IB/GDRDMA, NET/Socket or NET/<plugin>; ValueError if NCCL prints no such transport.

    >>> transport_kind("NET/IB/1(2)/GDRDMA/Shared"), transport_kind("direct shared memory")
    ('NET/IB/GDRDMA', 'SHM')

    Whether P2P goes over NVLink or PCIe cannot be told from it.
    """
    if not is_transport(text):
        raise ValueError(f"{text!r} is not a transport that NCCL prints, as P2P/IPC or NET/IB/0")
    if text == "direct shared memory":
        return "SHM"
    kind, name, *_ = text.split("/")
    if kind != "NET":
        return kind
    return "NET/IB/GDRDMA" if name == "IB" and "/GDRDMA" in text else f"NET/{name}"


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        *whole, rest = lines(piece)
        yield from whole
        if rest:
            yield rest


@dataclass
class _Said:
    """Everything the messages say, in their order, contradictions included."""

    anything: bool = False
    versions: dict[str, None] = field(default_factory=dict)
    networks: dict[str, None] = field(default_factory=dict)
    initialised: dict[str, None] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)
    rings: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    transports: dict[tuple[int, int], dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    gpus: dict[tuple[int, int], dict[tuple[str, str], dict[str, None]]] = field(default_factory=dict)
    """Ranks → GPUs → transports, of connections within a node."""
    warn_lines: int = 0
    warnings: dict[str, None] = field(default_factory=dict)
    unread: list[int] = field(default_factory=list)

    def take(self, number: int, line: str) -> None:
        """One line of the log; its number, counted from 1, is kept if it shows a connection that cannot be read."""
        if "CCL " not in line and " via " not in line:
            return  # most lines of a job are its own
        read = 0
        for message in messages(line):
            if message.kind == "INFO":
                self.anything = True
                read += self._connection(message.text)
                self._facts(message.text)
            else:
                self._warning_or_version(message)
        if read < connections_shown(line):
            self.unread.append(number)

    def _connection(self, text: str) -> bool:
        found = connection(text)
        if found:
            ranks = found.source, found.target
            self.transports[ranks][found.transport] = None
            if all(found.gpus) and not found.transport.startswith("NET/"):
                self.gpus.setdefault(ranks, {}).setdefault(found.gpus, {})[found.transport] = None
        return found is not None

    def _facts(self, text: str) -> None:
        """Whatever is no connection; RCCL ends those with the size."""
        if size := communicator_size(text):
            self.sizes.add(size)
        elif name := network(text):
            self.networks[name] = None
        elif name := initialised_network(text):
            self.initialised[name] = None
        elif found := ring(text):
            channel, length = found
            self.rings[length].add(channel)

    def _warning_or_version(self, message: Message) -> None:
        if message.kind == "WARN":
            self.anything = True
            self.warn_lines += 1
            self.warnings[without_next_process(message.text)[:_LONGEST_WARNING]] = None
        elif found := version(message.text):
            self.anything = True
            self.versions[found] = None

    def together(self) -> NcclLog:
        """What remains when contradictions are taken out."""
        nranks = self._nranks()
        certain = {pair: texts for pair, texts in self.transports.items() if nranks is None or max(pair) < nranks}
        outside = [f"{a}->{b}" for a, b in sorted(self.transports.keys() - certain.keys())]
        return NcclLog(
            nccl_version=_only(self.versions),
            network=_only(self._used_networks()),
            nranks=nranks,
            transports={f"{a}->{b}": tuple(texts) for (a, b), texts in certain.items()},
            warn_lines=self.warn_lines,
            warnings=tuple(self.warnings),
            missing=(
                *_several("NCCL versions", self.versions),
                *_several("networks", self._used_networks()),
                *not_read(self.unread),
                *([f"no communicator in the log has the ranks of {_some(outside)}"] if outside else ()),
            ),
            within_node=self._within_node(certain),
        )

    def _within_node(self, certain: Collection[tuple[int, int]]) -> dict[tuple[str, str], tuple[str, ...]]:
        found: dict[tuple[str, str], dict[str, None]] = {}
        for ranks in certain:
            for gpus, texts in self.gpus.get(ranks, {}).items():
                found.setdefault(gpus, {}).update(texts)
        return {gpus: tuple(texts) for gpus, texts in found.items()}

    def _nranks(self) -> int | None:
        """A single ring line proves nothing: it may have been cut. Two channels that name the same ranks do."""
        rings = {length for length, channels in self.rings.items() if len(channels) > 1}
        return max(self.sizes | rings, default=None)

    def _used_networks(self) -> Collection[str]:
        """NCCL 2.4 does not say which network it uses. It always initialises sockets, and prefers any other."""
        if self.networks or not (_only(self.versions) or "").startswith("2.4."):
            return self.networks
        return [name for name in self.initialised if name != "Socket"] or self.initialised


def _only(names: Collection[str]) -> str | None:
    return next(iter(names)) if len(names) == 1 else None


def _several(what: str, names: Collection[str]) -> Iterator[str]:
    if len(names) > 1:
        yield f"the log names several {what}: {_some(names)}"


def _some(things: Collection[str]) -> str:
    listed = [*things]
    others = len(listed) - _NAMES
    return ", ".join(listed[:_NAMES]) + (f" and {others} more" if others > 0 else "")
