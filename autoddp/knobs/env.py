"""Settings that a process learns at its start: another value needs another start of the script."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from autoddp.knobs.base import Knob, exact, one_of, whole_number_between


def _start(name: str, variable: str, says: str, check: Callable[[Any], str | None], on_the_link: bool = True) -> Knob:
    return Knob(name, says, check, exact, ddp_argument=False, variable=variable, start=True, on_the_link=on_the_link)


def _devices(kind: str, prefix: str = "") -> Callable[[Any], str | None]:
    """`check` for names of at most 16 devices with commas between them."""
    pattern = re.compile(rf"{prefix}[\w.:@-]{{1,15}}(,[\w.:@-]{{1,15}}){{0,15}}")

    def check(value: Any) -> str | None:
        good = isinstance(value, str) and pattern.fullmatch(value)
        return None if good else f"must be names of {kind} with commas between them"

    return check


INTERFACES = _start(
    "interfaces",
    "GLOO_SOCKET_IFNAME",
    "network interfaces that Gloo spreads its messages over",
    _devices("network interfaces"),
)
NCCL_SOCKET_THREADS = _start(
    "nccl_socket_threads",
    "NCCL_SOCKET_NTHREADS",
    "CPU threads with which NCCL serves its sockets: one alone cannot fill a fast link",
    whole_number_between(1, 16),
)
NCCL_SOCKETS_PER_THREAD = _start(
    "nccl_sockets_per_thread",
    "NCCL_NSOCKS_PERTHREAD",
    "TCP connections of each of NCCL's socket threads; with their number at most 64",
    whole_number_between(1, 16),
)
NCCL_P2P_LEVEL = _start(
    "nccl_p2p_level",
    "NCCL_P2P_LEVEL",
    "how far apart two GPUs may be for one to write into the other's memory",
    one_of("PIX", "PXB", "PHB", "NODE", "SYS"),
)
NCCL_P2P_DISABLE = _start(
    "nccl_p2p_disable",
    "NCCL_P2P_DISABLE",
    "1 sends what GPUs exchange through shared memory, which beats peer access that an IOMMU slows down",
    one_of("1"),
)
NCCL_ALGO = _start(
    "nccl_algo",
    "NCCL_ALGO",
    "the algorithm of NCCL's all-reduces: trees have less latency over many nodes, rings more bandwidth",
    one_of("Ring", "Tree", "ring,tree;allreduce:tree"),  # the third is the second of NCCL 2.24 and later
)
NCCL_PROTO = _start(
    "nccl_proto",
    "NCCL_PROTO",
    "the one protocol that NCCL uses: Simple for bandwidth, LL for small messages",
    one_of("Simple", "LL"),  # LL128 corrupts data on machines that are not made for it
)
NCCL_MIN_CHANNELS = _start(
    "nccl_min_channels",
    "NCCL_MIN_NCHANNELS",
    "channels that NCCL opens at least: more of them fill a wide link, and take more of the GPU",
    whole_number_between(1, 64),
)
NCCL_MAX_CHANNELS = _start(
    "nccl_max_channels",
    "NCCL_MAX_NCHANNELS",
    "channels that NCCL opens at most: fewer of them leave more of the GPU to the backward pass",
    whole_number_between(1, 64),
    on_the_link=False,
)
NCCL_BUFFER_BYTES = _start(
    "nccl_buffer_bytes",
    "NCCL_BUFFSIZE",
    "bytes of a channel's buffer: larger ones keep a long or fast network busy, and take memory of the GPU",
    whole_number_between(2**20, 2**26),
)
NCCL_NVLS = _start(
    "nccl_nvls",
    "NCCL_NVLS_ENABLE",
    "whether NVLink switches do the additions: 0 takes the memory back that this needs",
    one_of("0", "1"),
)
NCCL_IB_HCA = _start(
    "nccl_ib_hca",
    "NCCL_IB_HCA",
    "RDMA devices that NCCL uses, = for exact names",
    _devices("RDMA devices", "=?"),
)
NCCL_GDR_LEVEL = _start(
    "nccl_gdr_level",
    "NCCL_NET_GDR_LEVEL",
    "how far a NIC may be from a GPU to read its memory directly",
    one_of("LOC", "PIX", "PXB", "PHB", "SYS"),
)
ALLOCATOR = _start(
    "allocator",
    "PYTORCH_CUDA_ALLOC_CONF",
    "how torch cuts up the GPU's memory: expandable segments leave no holes, and save freeing and asking again",
    one_of("expandable_segments:True"),
    on_the_link=False,
)

START_KNOBS: tuple[Knob, ...] = (
    INTERFACES,
    NCCL_SOCKET_THREADS,
    NCCL_SOCKETS_PER_THREAD,
    NCCL_P2P_LEVEL,
    NCCL_P2P_DISABLE,
    NCCL_ALGO,
    NCCL_PROTO,
    NCCL_MIN_CHANNELS,
    NCCL_MAX_CHANNELS,
    NCCL_BUFFER_BYTES,
    NCCL_NVLS,
    NCCL_IB_HCA,
    NCCL_GDR_LEVEL,
    ALLOCATOR,
)
"""All of them. Which ones a job is offered is `topology.start_settings`' affair."""
