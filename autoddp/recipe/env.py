"""The variables that a recipe may set, and the values that each may have.

A recipe may come from the internet, so this list is closed: what is spelled out here, and the variables of our own
knobs, which `knobs` spells out likewise. No patterns for names: `NCCL_*` would let
in NCCL_NET_PLUGIN, which loads a library. What stands here takes a number, a switch, a word or the name of a network
device; nothing here loads code, reads or writes a path, changes arithmetic or hides failures. A value that a library
would only warn of, ignore or fail at is refused here, before a job is started with it.

Sources: NCCL's list of environment variables, libgomp's manual, torch's notes on CUDA memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from autoddp.knobs import KNOBS, AnyKnob
from autoddp.knobs.base import one_of

Rule = Callable[[str], "str | None"]
"""Answers None for a good value, else the rule that it breaks."""


def _whole(low: int, high: int) -> Rule:
    def check(value: str) -> str | None:
        good = re.fullmatch(r"-?[0-9]{1,12}", value) and low <= int(value) <= high
        return None if good else f'must be a whole number from {low} to {high} in quotes, as "{max(low, 1)}"'

    return check


def _text(pattern: str, says: str) -> Rule:
    def check(value: str) -> str | None:
        return None if len(value) <= _LONGEST and re.fullmatch(pattern, value) else f"must be {says}"

    return check


_LONGEST = 256  # characters
_THREADS = _whole(1, 1024)
_CHANNELS = _whole(1, 64)
_BYTES = _whole(1, 2**31 - 1)
_SWITCH = one_of("0", "1")
_SIGNED_SWITCH = one_of("-2", "-1", "0", "1", "2")  # NCCL takes a negative number for "decide yourself"
_TRUTH = one_of("true", "false", "TRUE", "FALSE", "True", "False", "0", "1")
_TORCH_SWITCH = one_of("0", "1", "y", "n", "yes", "no", "t", "f", "true", "false")
_DISTANCE = one_of("LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "0", "1", "2", "3", "4", "5", "6")  # NCCL has no NODE
_DEVICE = r"[\w.@:-]{1,32}"
_DEVICES = rf"{_DEVICE}(,{_DEVICE}){{0,31}}"
_CPUS = _text(r"[0-9][0-9 ,:-]*", 'numbers of CPUs, as "0-7 16-23"')
_ALLOCATOR = _text(r"\w+:[\w.:\[\]>-]+(,\w+:[\w.:\[\]>-]+)*", 'options, as "expandable_segments:True"')

_OPERATORS: dict[str, Rule] = {
    "GOMP_CPU_AFFINITY": _CPUS,
    "KMP_AFFINITY": _text(r"[\w=,\[\]{}: -]+", 'words with commas between them, as "granularity=fine,compact,1,0"'),
    "KMP_BLOCKTIME": lambda value: None if value == "infinite" else _whole(0, 2**31 - 1)(value),
    "MKL_DYNAMIC": _TRUTH,
    "MKL_NUM_THREADS": _THREADS,
    "OMP_DYNAMIC": _TRUTH,
    "OMP_NUM_THREADS": _THREADS,
    "OMP_PLACES": _text(r"[\w(){}:, +-]+", 'places of OpenMP, as "cores"'),
    "OMP_PROC_BIND": _text(
        r"(?i)(true|false|master|primary|close|spread)(,(master|primary|close|spread))*", 'a binding, as "close"'
    ),
    "OMP_SCHEDULE": _text(r"(?i)(static|dynamic|guided|auto)(,[0-9]{1,9})?", 'a schedule of OpenMP, as "static"'),
    "OMP_WAIT_POLICY": one_of("active", "passive", "ACTIVE", "PASSIVE"),
    "OPENBLAS_NUM_THREADS": _THREADS,
}

_MEMORY_AND_DEVICE: dict[str, Rule] = {
    "CUDA_DEVICE_MAX_CONNECTIONS": _whole(1, 32),
    "CUDA_MODULE_LOADING": one_of("LAZY", "EAGER"),
    "MALLOC_ARENA_MAX": _whole(1, 4096),
    "PYTORCH_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR,
}

_GLOO: dict[str, Rule] = {
    "GLOO_SOCKET_IFNAME": _text(_DEVICES, "names of network interfaces with commas between them"),
}

_CHOICE = _text(r"\^?[\w:^,;]+", 'words of NCCL with commas between them, as "Ring,Tree"')

_NCCL_ALGORITHM: dict[str, Rule] = {
    "NCCL_ALGO": _CHOICE,
    "NCCL_BUFFSIZE": _BYTES,
    "NCCL_CGA_CLUSTER_SIZE": _whole(0, 8),
    "NCCL_COLLNET_ENABLE": _SWITCH,
    "NCCL_COLLNET_NODE_THRESHOLD": _whole(1, 2**20),
    "NCCL_LAUNCH_MODE": one_of("PARALLEL", "GROUP"),
    "NCCL_LAUNCH_ORDER_IMPLICIT": one_of("0", "1", "2"),
    "NCCL_LL128_BUFFSIZE": _BYTES,
    "NCCL_LL_BUFFSIZE": _BYTES,
    "NCCL_MAX_CTAS": _CHANNELS,
    "NCCL_MAX_NCHANNELS": _CHANNELS,
    "NCCL_MEM_SYNC_DOMAIN": _whole(0, 3),
    "NCCL_MIN_CTAS": _CHANNELS,
    "NCCL_MIN_NCHANNELS": _CHANNELS,
    "NCCL_NTHREADS": one_of("64", "128", "256", "512"),
    "NCCL_NVLS_ENABLE": one_of("0", "1", "2"),
    "NCCL_NVLS_NCHANNELS": _CHANNELS,
    "NCCL_PROTO": _CHOICE,
    "NCCL_RUNTIME_CONNECT": _SWITCH,
    "NCCL_WORK_FIFO_BYTES": _BYTES,
}

_NCCL_WITHIN_A_NODE: dict[str, Rule] = {
    "NCCL_CUMEM_ENABLE": _SIGNED_SWITCH,
    "NCCL_CUMEM_HOST_ENABLE": _SIGNED_SWITCH,
    "NCCL_GRAPH_REGISTER": _SWITCH,
    "NCCL_IGNORE_CPU_AFFINITY": _SWITCH,
    "NCCL_LOCAL_REGISTER": one_of("0", "1", "2"),
    "NCCL_MAX_P2P_NCHANNELS": _CHANNELS,
    "NCCL_MIN_P2P_NCHANNELS": _CHANNELS,
    "NCCL_P2P_DIRECT_DISABLE": _SWITCH,
    "NCCL_P2P_DISABLE": _SWITCH,
    "NCCL_P2P_LEVEL": _DISTANCE,
    "NCCL_P2P_NVL_CHUNKSIZE": _BYTES,
    "NCCL_P2P_PCI_CHUNKSIZE": _BYTES,
    "NCCL_SHM_DISABLE": _SWITCH,
    "NCCL_SHM_MEMCPY_MODE": _whole(0, 3),
    "NCCL_SHM_USE_CUDA_MEMCPY": _SWITCH,
}

_NCCL_BETWEEN_NODES: dict[str, Rule] = {
    "NCCL_CROSS_NIC": one_of("0", "1", "2"),
    "NCCL_DMABUF_ENABLE": _SWITCH,
    "NCCL_IB_ADAPTIVE_ROUTING": _SIGNED_SWITCH,
    "NCCL_IB_AR_THRESHOLD": _whole(0, 2**31 - 1),
    "NCCL_IB_DISABLE": _SWITCH,
    "NCCL_IB_GID_INDEX": _whole(-1, 255),
    "NCCL_IB_HCA": _text(rf"\^?=?{_DEVICES}", "names of RDMA devices with commas between them"),
    "NCCL_IB_MERGE_NICS": _SWITCH,
    "NCCL_IB_PCI_RELAXED_ORDERING": one_of("0", "1", "2"),
    "NCCL_IB_QPS_PER_CONNECTION": _whole(1, 128),
    "NCCL_IB_SL": _whole(-1, 15),
    "NCCL_IB_SPLIT_DATA_ON_QPS": _SWITCH,
    "NCCL_IB_TC": _whole(-1, 255),
    "NCCL_NCHANNELS_PER_NET_PEER": _CHANNELS,
    "NCCL_NET_GDR_C2C": _SWITCH,
    "NCCL_NET_GDR_LEVEL": _DISTANCE,
    "NCCL_NET_GDR_READ": _SIGNED_SWITCH,
    "NCCL_NET_SHARED_BUFFERS": _SIGNED_SWITCH,
    "NCCL_NET_SHARED_COMMS": _SWITCH,
    "NCCL_NSOCKS_PERTHREAD": _whole(1, 16),
    "NCCL_P2P_NET_CHUNKSIZE": _BYTES,
    "NCCL_P2P_PXN_LEVEL": one_of("0", "1", "2"),
    "NCCL_PXN_DISABLE": _SWITCH,
    "NCCL_SOCKET_FAMILY": one_of("AF_INET", "AF_INET6"),
    "NCCL_SOCKET_IFNAME": _text(rf"\^?=?{_DEVICES}", "names of network interfaces with commas between them"),
    "NCCL_SOCKET_NTHREADS": _whole(1, 16),
}

_TORCH_NCCL: dict[str, Rule] = {
    "TORCH_NCCL_AVOID_RECORD_STREAMS": _TORCH_SWITCH,
    "TORCH_NCCL_CUDA_EVENT_CACHE": _TORCH_SWITCH,
    "TORCH_NCCL_HIGH_PRIORITY": _TORCH_SWITCH,
    "TORCH_NCCL_RANKS_PER_ROOT": _whole(1, 2**20),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": _TORCH_SWITCH,
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": _TORCH_SWITCH,
}


_LAUNCHER: dict[str, Rule] = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": one_of("1"),  # else ranks that a script starts by itself wait for torchrun's
}


def _of_knob(knob: AnyKnob) -> Rule:
    """The knob's own rule, for its value as text."""

    def check(value: str) -> str | None:
        number = int(value) if re.fullmatch(r"[0-9]{1,12}", value) else value
        broken = knob.check(number) and knob.check(value)
        return f"{broken}, in quotes" if broken else None

    return check


ENV_ALLOWED: Mapping[str, Rule] = {
    **{knob.variable: _of_knob(knob) for knob in KNOBS if knob.variable},
    **_OPERATORS,
    **_MEMORY_AND_DEVICE,
    **_GLOO,
    **_NCCL_ALGORITHM,
    **_NCCL_WITHIN_A_NODE,
    **_NCCL_BETWEEN_NODES,
    **_TORCH_NCCL,
    **_LAUNCHER,
}
"""Each variable, with the rule for its values."""
