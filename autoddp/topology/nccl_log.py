"""What NCCL says it does: the log of a job that ran with NCCL_DEBUG=INFO.

    log = read_nccl_log(Path("job.log").read_text(errors="replace"))
    log.network                 # 'IB'
    log.transports["7->8"]      # ('NET/IB/1/GDRDMA',)
    log.missing                 # (), or sentences about what could not be read

Several processes may write into one file at once, so that a line can hold the beginnings of several messages. NCCL
writes `host:pid:tid [gpu] NCCL INFO ` before each: what follows the last of them is one process's own words to the line
end. An earlier one was interrupted at a place that cannot be seen; like a cut line it is marked with `…`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from autoddp.topology.text import CUT, lines, not_read, nothing_readable, some

_LONGEST_WARNING = 500  # characters; NCCL's own buffer has 1024

# Every repetition is bounded or ends the pattern, and no two can match the same text: linear for any bytes.
_BEGINNING = re.compile(r"[NR]CCL (INFO|WARN|version) ")
_PROCESS = re.compile(r":[0-9]{1,10}:[0-9]{1,10} \[")
# With CUDA's version: PyTorch's errors mention one without it, and old ones a wrong one. RCCL adds `HEAD:`, and writes
# `RCCL version : 2.26.6-HEAD:f224e2c` since 2.21, with HIP's version in a line of its own.
_NUMBERS = r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}"
_VERSION = re.compile(rf"({_NUMBERS}\+(?:cuda|hip)[A-Za-z0-9_.]{{0,32}})(?: HEAD:.*)?|: ({_NUMBERS})-.*")
_NAME = r"[A-Za-z][A-Za-z0-9_.+-]{0,31}(?: [A-Za-z0-9_.+-]{1,31}){0,3}"
_NETWORK = re.compile(rf"Using network ({_NAME})")
_INITIALISED = re.compile(r"NET/([A-Za-z0-9_]{1,32}) : Using .*")
_SIZE = re.compile(r"(?:rank ([0-9]{1,7}) n[rR]anks|comm 0x[0-9a-f]{1,16} nRanks) ([0-9]{1,7})(?= [A-Za-z]|$)")
_WIDEST = 19  # ranks: of a longer ring NCCL may print the first 20 only, without a sign
_RING = re.compile(rf"Channel ([0-9]{{2,3}})/[0-9]{{2,3}} :((?: +[0-9]{{1,2}}){{1,{_WIDEST}}})")

_RANK = r"([0-9]{1,7})(?:\[([0-9a-f]{1,16})\])?"  # in brackets the GPU: its number, once its PCI address
_LOCAL = (
    r"P2P/(?:IPC|CUMEM|MNNVL|direct pointer|common device|indirect/[0-9]{1,7}\[[0-9a-f]{1,16}\])(?:/read)?(?:/CE)?"
    r"|SHM/(?:direct|CE)(?:/(?:direct|CE))?|direct shared memory"
)
_NET = rf"NET/{_NAME}/[0-9]{{1,4}}(?:\([0-9]{{1,7}}\))?(?:/GDRDMA(?:\(PCI\))?)?(?:/Shared)?"
_TRANSPORT = re.compile(rf"{_LOCAL}|{_NET}")
# Only what goes over the network names its direction. RCCL adds the communicator.
_CONNECTION = re.compile(
    rf"(?:Channel [0-9]{{2,3}}(?:/[0-9]{{1,3}})?|Ring [0-9]{{2,3}}) : {_RANK} -> {_RANK}"
    rf"(?: via ({_LOCAL})| \[(?:send|receive)\] via ({_NET}))(?: comm 0x.*)?"
)
_BETWEEN_TRAYS = "P2P/MNNVL"  # NVLink may join several hosts, whose GPUs are all numbered from 0
_VIA = re.compile(r"[0-9\]] via (?!COLLNET)(?:[A-Z0-9]{3}|direct shared)")  # a connection, readable or not


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
    """Texts of the warnings, each once."""
    missing: tuple[str, ...] = ()
    """What could not be read of connections, or contradicts itself; a sentence for each kind."""
    within_node: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """Two GPUs as NCCL names them, by number (`3`) or once by PCI address (`8a000`), → the transports between them that
    use no network."""

    @property
    def transport_class_by_pair(self) -> dict[str, tuple[str, ...]]:
        """`0->1` → P2P, SHM, NET: more than one if communicators or channels differ."""
        return {
            pair: tuple(sorted({transport_kind(text).partition("/")[0] for text in texts}))
            for pair, texts in self.transports.items()
        }

    @property
    def transport_classes(self) -> tuple[str, ...]:
        """Transport classes of all pairs, each once."""
        return tuple(sorted({name for names in self.transport_class_by_pair.values() for name in names}))

    @property
    def gdrdma(self) -> bool | None:
        """Whether any connection uses GPUDirect RDMA; None if there is no connection to tell it from."""
        texts = [text for texts in self.transports.values() for text in texts]
        return any("/GDRDMA" in text for text in texts) if texts else None

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        names = ("nccl_version", "network", "nranks", "transport_classes", "transports", "transport_class_by_pair")
        return {name: getattr(self, name) for name in (*names, "gdrdma", "warn_lines", "warnings", "missing")}


def read_nccl_log(log: str | Iterable[str]) -> NcclLog:
    """All that is certain of a log, given as one text or line by line, as an open file gives it.

    Anything may stand between NCCL's lines. NothingReadable if there is none of them.
    """
    said, number = _Said(), 0
    every = (line for piece in ([log] if isinstance(log, str) else log) for line in _whole_lines(piece))
    for number, line in enumerate(every, start=1):
        said.take(number, line)
    if not said.anything:
        raise nothing_readable(
            "the log of a run with NCCL_DEBUG=INFO, with lines like `host:42:57 [0] NCCL INFO Using network IB`",
            of_lines=number,
        )
    return said.together()


def _whole_lines(piece: str) -> list[str]:
    """The lines of a piece; what follows its last line end is none if it is empty."""
    found = lines(piece)
    return found if found[-1] else found[:-1]


def transport_kind(text: str) -> str:
    """P2P, SHM, NET/IB, NET/IB/GDRDMA, NET/Socket or NET/<plugin>; ValueError if NCCL prints no such transport.

    >>> transport_kind("NET/IB/1(2)/GDRDMA/Shared"), transport_kind("direct shared memory")
    ('NET/IB/GDRDMA', 'SHM')

    Whether P2P goes over NVLink or PCIe cannot be told from it.
    """
    if not _TRANSPORT.fullmatch(text):
        raise ValueError(f"{text!r} is not a transport that NCCL prints, as P2P/IPC or NET/IB/0")
    if text == "direct shared memory":
        return "SHM"
    kind, name, *_ = text.split("/")
    if kind != "NET":
        return kind
    return "NET/IB/GDRDMA" if name == "IB" and "/GDRDMA" in text else f"NET/{name}"


_Names = dict[str, None]  # a set in the order of its additions


@dataclass
class _Said:
    """Everything the messages say, in their order, contradictions included."""

    anything: bool = False
    versions: _Names = field(default_factory=dict)
    networks: _Names = field(default_factory=dict)
    initialised: _Names = field(default_factory=dict)
    """Networks that are there, which does not say that they are used."""
    sizes: set[int] = field(default_factory=set)
    rings: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    transports: dict[tuple[int, int], _Names] = field(default_factory=lambda: defaultdict(dict))
    gpus: dict[tuple[int, int], dict[tuple[str, str], _Names]] = field(default_factory=lambda: defaultdict(dict))
    """Ranks → GPUs → transports, of connections within a node."""
    warn_lines: int = 0
    warnings: _Names = field(default_factory=dict)
    unread: list[int] = field(default_factory=list)

    def take(self, number: int, line: str) -> None:
        """One line of the log; its number, counted from 1, is kept if it shows a connection that cannot be read."""
        if "CCL " not in line and " via " not in line:
            return  # most lines of a job are its own
        read = 0
        _, *parts = _BEGINNING.split(line)
        for i, (kind, text) in enumerate(zip(parts[::2], parts[1::2], strict=True), start=1):
            whole = text if 2 * i == len(parts) else text + CUT
            if kind == "INFO":
                self.anything = True
                read += self._connection(whole)
                self._facts(whole)
            elif kind == "WARN":
                self.anything = True
                self.warn_lines += 1
                self.warnings[_without_next_process(whole)[:_LONGEST_WARNING]] = None
            elif found := _VERSION.fullmatch(whole):
                self.anything = True
                self.versions[found[1] or found[2]] = None
        if read < len(_VIA.findall(line)):
            self.unread.append(number)

    def _connection(self, text: str) -> bool:
        """Whether it is a connection (`Channel 00/0 : 0[0] -> 1[1] via P2P/IPC`), complete and of a known form."""
        found = _CONNECTION.fullmatch(text)
        if found is None or int(found[1]) == int(found[3]):
            return False
        ranks, transport = (int(found[1]), int(found[3])), found[5] or found[6]
        self.transports[ranks][transport] = None
        if found[2] and found[4] and found[5] and not found[5].startswith(_BETWEEN_TRAYS):
            self.gpus[ranks].setdefault((found[2], found[4]), {})[transport] = None
        return True

    def _facts(self, text: str) -> None:
        """What is no connection. The size of a communicator may also stand at the end of one, as RCCL prints it."""
        if (size := _SIZE.search(text)) and not (size[1] and int(size[1]) >= int(size[2])):
            self.sizes.add(int(size[2]))
        elif found := _NETWORK.fullmatch(text):
            self.networks[found[1]] = None
        elif found := _INITIALISED.fullmatch(text):
            self.initialised[found[1]] = None
        elif found := _RING.fullmatch(text):
            ranks = sorted(map(int, found[2].split()))
            if ranks == [*range(len(ranks))]:
                self.rings[len(ranks)].add(found[1])

    def together(self) -> NcclLog:
        """The log as one object, without statements that contradict each other."""
        # A single ring line proves nothing: it may have been cut. Two channels that name the same ranks do.
        rings = {length for length, channels in self.rings.items() if len(channels) > 1}
        nranks = max(self.sizes | rings, default=None)
        certain = {pair: texts for pair, texts in self.transports.items() if nranks is None or max(pair) < nranks}
        outside = [f"{a}->{b}" for a, b in sorted(self.transports.keys() - certain.keys())]
        networks = self._used_networks()
        within_node: dict[tuple[str, str], _Names] = defaultdict(dict)
        for gpus, texts in (item for ranks in certain for item in self.gpus.get(ranks, {}).items()):
            within_node[gpus].update(texts)
        return NcclLog(
            nccl_version=_only(self.versions),
            network=_only(networks),
            nranks=nranks,
            transports={f"{a}->{b}": tuple(texts) for (a, b), texts in certain.items()},
            warn_lines=self.warn_lines,
            warnings=tuple(self.warnings),
            missing=(
                *_several("NCCL versions", self.versions),
                *_several("networks", networks),
                *not_read(self.unread),
                *([f"no communicator in the log has the ranks of {some(outside)}"] if outside else ()),
                *([] if self.versions else ["the log does not say which version of NCCL it is from"]),
                *([] if networks else ["the log does not say which network is used"]),
            ),
            within_node={gpus: tuple(texts) for gpus, texts in within_node.items()},
        )

    def _used_networks(self) -> Collection[str]:
        """NCCL 2.4 does not say which network it uses. It always initialises sockets, and prefers any other."""
        if self.networks or not (_only(self.versions) or "").startswith("2.4."):
            return self.networks
        return [name for name in self.initialised if name != "Socket"] or self.initialised


def _without_next_process(text: str) -> str:
    """An interrupted message up to the word that runs into the name of the interrupting process.

    >>> _without_next_process("Failed to open libibverbs.so[.1]hostA:86:87 [1] …")
    'Failed to open…'
    """
    match = _PROCESS.search(text) if text.endswith(CUT) else None
    return text[: match.start()].rpartition(" ")[0] + CUT if match else text


def _only(names: Collection[str]) -> str | None:
    return next(iter(names)) if len(names) == 1 else None


def _several(what: str, names: Collection[str]) -> Iterator[str]:
    if len(names) > 1:
        yield f"the log names several {what}: {some(names)}"
