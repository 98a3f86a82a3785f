"""Settings that a process learns at its start: another value needs another start of the script."""

from __future__ import annotations

import re
from typing import Any

from autoddp.knobs.base import Knob, exact, one_of, whole_number_between


def _interfaces(value: Any) -> str | None:
    good = isinstance(value, str) and re.fullmatch(r"[\w.:@-]{1,15}(,[\w.:@-]{1,15}){0,15}", value)
    return None if good else "must be names of network interfaces with commas between them"


INTERFACES = Knob(
    name="interfaces",
    says="network interfaces that Gloo spreads its messages over",
    check=_interfaces,
    rung_of=exact,
    ddp_argument=False,
    variable="GLOO_SOCKET_IFNAME",
    start=True,
)

NCCL_SOCKET_THREADS = Knob(
    name="nccl_socket_threads",
    says="CPU threads with which NCCL serves its sockets: one alone cannot fill a fast link",
    check=whole_number_between(1, 16),
    rung_of=exact,
    ddp_argument=False,
    variable="NCCL_SOCKET_NTHREADS",
    start=True,
)

NCCL_SOCKETS_PER_THREAD = Knob(
    name="nccl_sockets_per_thread",
    says="TCP connections of each of NCCL's socket threads; with their number at most 64",
    check=whole_number_between(1, 16),
    rung_of=exact,
    ddp_argument=False,
    variable="NCCL_NSOCKS_PERTHREAD",
    start=True,
)

NCCL_P2P_LEVEL = Knob(
    name="nccl_p2p_level",
    says="how far apart two GPUs may be for one to write into the other's memory",
    check=one_of("PIX", "PXB", "PHB", "NODE", "SYS"),
    rung_of=exact,
    ddp_argument=False,
    variable="NCCL_P2P_LEVEL",
    start=True,
)
