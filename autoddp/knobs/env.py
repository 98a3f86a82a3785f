"""Knobs that are environment variables which a process reads at its start: another value needs another start.

A new variable is one entry of `START_KNOBS`. Its `offers` decides where it is worth a start of the script. A setting is
offered only if this node's topology, its network or the job's first steps give a reason for it.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoddp.knobs.base import Candidate, Knob, Phase, Reach, Setting, one_of, whole_number_between

if TYPE_CHECKING:  # imported at run time only where settings are offered: a job with a recipe reads no topology
    from autoddp.topology.facts import Node

_FAST_ETHERNET = 20_000  # Mbit/s; for slower networks one socket thread is enough
_NVLINKS_OF_A_SWITCH = 12  # NVLinks per GPU; with that many (A100, H100) all go to NVLink switches
_VERSION_WITH_NVLS = 4  # NVLink's version on the H100, the first whose switches can add
_ALGORITHM_OF_EACH = (2, 24)
"""The first NCCL that ends a job if `NCCL_ALGO` names an algorithm that a collective lacks (Broadcast has no trees)."""
TREES = "ring,tree;allreduce:tree"
"""Value of `NCCL_ALGO` for trees in all-reduces only, in the syntax of that NCCL."""
_MANY_CHANNELS, _FEW_CHANNELS = 16, 8
"""More channels carry more, but each takes a multiprocessor from the backward pass: one candidate each way."""
_SOCKET_THREADS = _SOCKETS_PER_THREAD = 4  # what NCCL's documentation advises for networks of 100 Gbit/s
_LARGE_BUFFER = 8 * 2**20  # bytes; twice NCCL's default
_KEEPS, _KEEPS_OF_SMALL = (
    f"glibc.malloc.mmap_threshold={size}:glibc.malloc.trim_threshold={4 * 2**30}" for size in (2**30, 2**25)
)
"""Values of `GLIBC_TUNABLES`. Up to 4 GiB of freed memory stay in the process, of tensors of up to 1 GiB, or 32 MiB."""
_KEEPS_SINCE = (2, 36)
"""The first glibc that is known to take the larger size; older ones refuse more than 32 MiB."""
_LOST_IN_MALLOC = 0.1  # of a step, that page faults take: a start of the script must be worth it
_OTHER_CLASS = 0.5  # share of the fastest port's rate: a slower port is taken to serve storage or logins
_LONGEST_OF_INTERFACES, _LONGEST_OF_RDMA = 15, 63  # letters of a name, by the kernel; udev makes roceP48p1s0f0v12


@dataclass(frozen=True)
class NodeAndJob:
    """What is known of one node and the job on it, to decide which env settings are worth trying."""

    node: Node | None
    """The node's topology; None if the job does not use NCCL for the gradients."""
    nodes: int
    """Number of nodes of the job."""
    environment: Mapping[str, str]
    nccl: tuple[int, ...] = ()
    """NCCL's version; empty if the job does not use NCCL for the gradients."""
    tuner: str = ""
    """The plugin with which the cloud provider chooses NCCL's algorithms, see `topology.nccl.tuner`."""
    interfaces: str = ""
    """The network interfaces that Gloo could use at the same time, separated by commas; "" if there is only one."""
    frees_memory: bool = False
    """Whether torch's allocator had to return GPU memory to the driver and request it again."""
    in_page_faults: float = 0.0
    """Share of a step on the CPU that page faults take at most; 0 where there is no room for memory that is kept."""


Offers = Callable[[NodeAndJob], Iterator[Candidate]]


@dataclass(frozen=True)
class StartKnob(Knob[Any]):
    """A knob that takes effect only in a new process."""

    offers: Offers = lambda _around: iter(())
    """Yields the settings that are worth a start here, the most promising first; none if there is no reason for one."""
    pinned_by: tuple[str, ...] = ()
    """If the user has set any of these variables, no other value is offered."""


def start_settings(around: NodeAndJob) -> list[Setting]:
    """Settings worth another start of the script on this node, the most promising first."""
    free = (knob for knob in START_KNOBS if not set(knob.pinned_by) & set(around.environment))
    return [knob.setting(candidate) for knob in free for candidate in knob.offers(around)]


def may_lose_data(setting: Mapping[str, Any]) -> bool:
    """Whether a setting may be tried only where a benchmark has seen right sums with it, see `Knob.may_lose_data`."""
    return any(knob.may_lose_data for knob in START_KNOBS if knob.name in setting)


def _start(
    name: str,
    variable: str,
    says: str,
    check: Callable[[Any], str | None],
    offers: Offers,
    pinned_by: tuple[str, ...] | None = None,
    on_the_link: bool = True,
    does: Callable[[Any], str] | None = None,
    may_lose_data: bool = False,
) -> StartKnob:
    return StartKnob(
        name=name,
        says=says,
        does=does,
        check=check,
        reach=Reach.START,
        phase=Phase.LAST,
        variable=variable,
        on_the_link=on_the_link,
        may_lose_data=may_lose_data,
        offers=offers,
        pinned_by=(variable,) if pinned_by is None else pinned_by,
    )


def _devices(kind: str, longest: int, prefix: str = "") -> Callable[[Any], str | None]:
    """`check` for the names of at most 16 devices, of up to `longest` letters, separated by commas."""
    pattern = re.compile(rf"{prefix}[\w.:@-]{{1,{longest}}}(,[\w.:@-]{{1,{longest}}}){{0,15}}")

    def check(value: Any) -> str | None:
        good = isinstance(value, str) and pattern.fullmatch(value)
        return None if good else f"must be names of {kind} with commas between them"

    return check


def _where(applies: Callable[[NodeAndJob], bool], candidate: Candidate) -> Offers:
    """`offers` that yields `candidate` where `applies` returns True."""
    return lambda around: iter([candidate] if applies(around) else [])


def _transports(around: NodeAndJob) -> dict[str, set[tuple[int, int]]]:
    """Transport → pairs of this node's GPUs that NCCL is predicted to connect by it."""
    from autoddp.topology.verdict import verdicts

    found: dict[str, set[tuple[int, int]]] = {}
    for way in verdicts(around.node, around.environment) if around.node else ():
        a, _, b = way.between.replace("GPU", "").partition("-")
        found.setdefault(way.transport, set()).add((int(a), int(b)) if b else (-1, -1))
    return found


def _between_nodes(around: NodeAndJob) -> str:
    """The transport to another node; "" for a job on one node."""
    from autoddp.topology.verdict import between_nodes

    return between_nodes(around.node, around.environment).transport if around.node and around.nodes > 1 else ""


def _nvlinks(around: NodeAndJob) -> list[int]:
    """Number of NVLinks of each pair of this node's GPUs."""
    return [pair.nvlinks for pair in around.node.pairs] if around.node else []


def _peer_access_is_unused(around: NodeAndJob) -> bool:
    """Whether peer access works between all GPUs, but NCCL's default distance limit keeps it from being used."""
    able = around.node is not None and all(pair.p2p == "OK" for pair in around.node.pairs)
    return able and any("SHM" in transport for transport in _transports(around))


def _peers_meet_in_the_cpu(around: NodeAndJob) -> bool:
    """Whether peer access crosses a CPU, where an IOMMU or access control in bridges can make it slower than memory."""
    pairs = around.node.pairs if around.node else ()
    over_cpu = {(p.a, p.b) for p in pairs if p.relation in ("PHB", "NODE", "SYS") and not p.nvlinks}
    return bool(_transports(around).get("P2P/PCIe", set()) & over_cpu)


def _has_nvlink_sharp(around: NodeAndJob) -> bool:
    """Whether the GPUs are joined by NVLink switches that can add (NVLink SHARP)."""
    links = _nvlinks(around)
    versions = [pair.nvlink_version or 0 for pair in around.node.pairs] if around.node else []
    return bool(links) and min(links) >= _NVLINKS_OF_A_SWITCH and min(versions) >= _VERSION_WITH_NVLS


def _fast_sockets(around: NodeAndJob) -> bool:
    nics = around.node.nics if around.node else ()
    fast = any((nic.speed_mbit or 0) >= _FAST_ETHERNET for nic in nics if nic.up)
    return fast and _between_nodes(around) == "NET/Socket"


def _far_nics_read_gpus(around: NodeAndJob) -> bool:
    """Whether RDMA could read GPU memory from further away than NCCL's default, which is below one host bridge."""
    return _between_nodes(around) == "NET/IB/GDRDMA" and not any(_nvlinks(around))


def _over_nccl_network(around: NodeAndJob) -> bool:
    return around.node is not None and around.nodes > 1


def _chooses_itself(around: NodeAndJob) -> bool:
    """Whether NCCL chooses algorithm and protocol by its own model of the network, which does not fit every network.

    With a tuner plugin nothing is offered, because the plugin fails on these variables or is overruled by them.
    """
    return _over_nccl_network(around) and not around.tuner


def _algorithms(around: NodeAndJob) -> Iterator[Candidate]:
    if _chooses_itself(around):
        yield TREES if around.nccl >= _ALGORITHM_OF_EACH else "Tree"
        yield "Ring"


def _near_devices(around: NodeAndJob) -> Iterator[Candidate]:
    """Yields the fast RDMA devices on the GPUs' NUMA nodes; nothing if these are all devices, or none."""
    if around.node is None or around.nodes < 2:
        return
    active = [port for port in around.node.rdma if port.active]
    best = max((port.rate_gbps or 0.0 for port in active), default=0.0)
    homes = {gpu.numa for gpu in around.node.gpus}
    near = [
        port.device
        for port in active
        if (port.rate_gbps or 0.0) >= _OTHER_CLASS * best and (port.numa in homes or None in (port.numa, *homes))
    ]
    if 0 < len(near) < len(active):
        yield "=" + ",".join(dict.fromkeys(near))


def keeps_memory() -> str:
    """Value of `GLIBC_TUNABLES` with which this host's glibc keeps what a step frees for the next one.

    By its own rules glibc may return much of a step's memory to the system, and get it anew in the next step.
    """
    version = platform.libc_ver()[1].split(".")
    known = all(part.isdigit() for part in version) and tuple(map(int, version)) >= _KEEPS_SINCE
    return _KEEPS if known else _KEEPS_OF_SMALL


def _keeping(around: NodeAndJob) -> Iterator[Candidate]:
    if around.in_page_faults >= _LOST_IN_MALLOC:
        yield keeps_memory()


def _together(around: NodeAndJob) -> Iterator[Candidate]:
    if around.interfaces and around.nodes > 1:
        yield around.interfaces


_PEERS = ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE")
_CHANNELS = ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
"""NCCL lets a minimum win over a maximum that is smaller. So where the user has set one, a minimum of ours
would overrule the user's maximum, and a maximum of ours below the user's minimum would do nothing."""
_SOCKETS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
_OTHER_MALLOCS = (
    *("GLIBC_TUNABLES", "LD_PRELOAD"),
    *("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"),
)
"""Variables with which the user chooses another malloc, or how it keeps memory."""

ALLOCATOR = _start(
    "allocator",
    "PYTORCH_CUDA_ALLOC_CONF",
    "how torch divides the GPU's memory: expandable segments avoid fragmentation and cudaMalloc retries",
    one_of("expandable_segments:True"),
    _where(lambda around: around.frees_memory, "expandable_segments:True"),
    # torch for ROCm reads the last one only where this knob's own is not set.
    pinned_by=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    on_the_link=False,
)
MALLOC = _start(
    "malloc",
    "GLIBC_TUNABLES",
    "what glibc does with freed memory: kept in the process, it needs no page faults in the next step",
    one_of(_KEEPS, _KEEPS_OF_SMALL),
    _keeping,
    pinned_by=_OTHER_MALLOCS,
    on_the_link=False,
    does=lambda _value: "freed memory kept for the next step",
)
INTERFACES = _start(
    "interfaces",
    "GLOO_SOCKET_IFNAME",
    "network interfaces that Gloo spreads its messages over",
    _devices("network interfaces", _LONGEST_OF_INTERFACES),
    _together,
    pinned_by=(),  # the launcher itself sets it to the interface that it has chosen, and checks what the user has set
    does=lambda names: f"several networks at once ({names})",
)
NCCL_P2P_LEVEL = _start(
    "nccl_p2p_level",
    "NCCL_P2P_LEVEL",
    "how far apart two GPUs may be for one to write into the other's memory",
    one_of("PIX", "PXB", "PHB", "SYS"),
    _where(_peer_access_is_unused, "SYS"),
    pinned_by=_PEERS,
    may_lose_data=True,
)
NCCL_P2P_DISABLE = _start(
    "nccl_p2p_disable",
    "NCCL_P2P_DISABLE",
    "1 sends what GPUs exchange through shared memory, which beats peer access that an IOMMU slows down",
    one_of("1"),
    _where(_peers_meet_in_the_cpu, "1"),
    pinned_by=_PEERS,
)
NCCL_MIN_CHANNELS = _start(
    "nccl_min_channels",
    "NCCL_MIN_NCHANNELS",
    "channels that NCCL opens at least: more of them fill a wide link, and take more of the GPU",
    whole_number_between(1, 64),
    _where(lambda around: any(_nvlinks(around)), _MANY_CHANNELS),
    pinned_by=_CHANNELS,
)
NCCL_MAX_CHANNELS = _start(
    "nccl_max_channels",
    "NCCL_MAX_NCHANNELS",
    "channels that NCCL opens at most: fewer of them leave more of the GPU to the backward pass",
    whole_number_between(1, 64),
    _where(lambda around: any(_nvlinks(around)), _FEW_CHANNELS),
    pinned_by=_CHANNELS,
    on_the_link=False,
)
NCCL_NVLS = _start(
    "nccl_nvls",
    "NCCL_NVLS_ENABLE",
    "whether NVLink switches do the additions: 0 takes the memory back that this needs",
    one_of("0", "1"),
    _where(_has_nvlink_sharp, "0"),
    pinned_by=("NCCL_NVLS_ENABLE", "NCCL_ALGO"),
)
NCCL_SOCKET_THREADS = _start(
    "nccl_socket_threads",
    "NCCL_SOCKET_NTHREADS",
    "CPU threads with which NCCL serves its sockets: one alone cannot fill a fast link",
    whole_number_between(1, 16),
    _where(_fast_sockets, {"nccl_socket_threads": _SOCKET_THREADS, "nccl_sockets_per_thread": _SOCKETS_PER_THREAD}),
    pinned_by=_SOCKETS,
)
NCCL_SOCKETS_PER_THREAD = _start(
    "nccl_sockets_per_thread",
    "NCCL_NSOCKS_PERTHREAD",
    "TCP connections of each of NCCL's socket threads; with their number at most 64",
    whole_number_between(1, 16),
    lambda _around: iter(()),  # offered with `nccl_socket_threads`
    pinned_by=_SOCKETS,
)
NCCL_IB_HCA = _start(
    "nccl_ib_hca",
    "NCCL_IB_HCA",
    "RDMA devices that NCCL uses, = for exact names",
    _devices("RDMA devices", _LONGEST_OF_RDMA, "=?"),
    _near_devices,
)
NCCL_GDR_LEVEL = _start(
    "nccl_gdr_level",
    "NCCL_NET_GDR_LEVEL",
    "how far a NIC may be from a GPU to read its memory directly",
    one_of("LOC", "PIX", "PXB", "PHB", "SYS"),
    _where(_far_nics_read_gpus, "SYS"),
    may_lose_data=True,
)
NCCL_ALGO = _start(
    "nccl_algo",
    "NCCL_ALGO",
    "the algorithm of NCCL's all-reduces: trees have less latency over many nodes, rings more bandwidth",
    one_of("Ring", "Tree", TREES),  # TREES is the form of "Tree" for NCCL 2.24 and later
    _algorithms,
)
NCCL_PROTO = _start(
    "nccl_proto",
    "NCCL_PROTO",
    "the one protocol that NCCL uses: Simple for bandwidth, LL for small messages",
    one_of("Simple", "LL"),  # LL128 corrupts data on machines that do not support it
    _where(_chooses_itself, "Simple"),
)
NCCL_BUFFER_BYTES = _start(
    "nccl_buffer_bytes",
    "NCCL_BUFFSIZE",
    "bytes of a channel's buffer: larger ones keep a long or fast network busy, and take memory of the GPU",
    whole_number_between(2**20, 2**26),
    _where(_over_nccl_network, _LARGE_BUFFER),
)

START_KNOBS: tuple[StartKnob, ...] = (
    ALLOCATOR,
    MALLOC,
    INTERFACES,
    NCCL_P2P_LEVEL,
    NCCL_P2P_DISABLE,
    NCCL_MIN_CHANNELS,
    NCCL_MAX_CHANNELS,
    NCCL_NVLS,
    NCCL_SOCKET_THREADS,
    NCCL_SOCKETS_PER_THREAD,
    NCCL_IB_HCA,
    NCCL_GDR_LEVEL,
    NCCL_ALGO,
    NCCL_PROTO,
    NCCL_BUFFER_BYTES,
)
"""All knobs of this kind, in the order in which their settings are offered."""
