"""What published guides tell people to check before a job on several GPUs, looked at on this node.

    for point in checklist(probe(), os.environ):
        print(point.what, point.found, point.expected, point.do)

A point that cannot be looked at from here says why. Nothing is expected of NCCL's variables but that they do not forbid
what this node has: NCCL chooses by itself, and a value that helps is one that somebody has measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autoddp.topology.facts import UNTOLD, Node
from autoddp.topology.nccl.interface_names import absent
from autoddp.topology.rdma.ports import RdmaPort, rdma_settings
from autoddp.units import data_size

State = Literal["good", "mend", "not needed", "not looked at"]


@dataclass(frozen=True)
class Point:
    """One thing to check."""

    what: str
    state: State
    found: str
    """What is here; where the point was not looked at, why."""
    expected: str
    do: str = ""
    """Empty where nothing is to be done."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def checklist(node: Node, environment: Mapping[str, str] | None) -> list[Point]:
    """All points, in the order in which a guide goes through them.

    `environment`: variables of the process that will train; None if they are not known, as for another machine's files.
    """
    return [*_of_the_library(node), *_of_the_script(), *_of_the_network(node, environment), *_of_speed(environment)]


def _of_the_library(node: Node) -> Iterator[Point]:
    version, expected = node.versions.get("nccl", ""), "an NCCL beside torch, because gradients on GPUs travel by it"
    if version and node.gpus:
        yield Point("NCCL", "good", f"version {version}", expected)
    elif node.gpus and (torch := node.versions.get("torch", "")) and not torch.endswith("+cpu"):
        # NVIDIA's containers and conda bring it as a library of the system, and some builds have it within torch.
        found = f"no package has it; torch {torch} may have one of its own"
        tells = "python -c 'import torch; print(torch.cuda.nccl.version())' tells"
        yield Point("NCCL", "not looked at", found, expected, tells)
    elif node.gpus and node.versions:
        yield Point("NCCL", "mend", "none", expected, "install the build of torch that is made for CUDA or ROCm")
    elif node.gpus:
        yield Point("NCCL", "not looked at", "these outputs do not tell its version", expected, "see --nccl-log")
    elif UNTOLD in node.unknown:
        yield Point("NCCL", "not looked at", node.unknown[UNTOLD], expected)
    elif not node.host:  # of another machine's files
        yield Point("NCCL", "not looked at", "these outputs tell of no GPU", expected, "see --gpu-list")
    else:
        yield Point("NCCL", "not needed", version or _no_gpu(node), "an NCCL where there are GPUs; Gloo serves CPUs")


def _of_the_script() -> Iterator[Point]:
    inside = "it is in your script, which is not run here"
    yield Point(
        "graph inputs",
        "not looked at",
        inside,
        "each batch is copied into the tensors that were captured; else a CUDA graph repeats its first batch for ever",
        "autoddp --cuda-graphs train.py captures by itself, and copies every input",
    )
    yield Point(
        "control flow",
        "not looked at",
        inside,
        "nothing that is captured in a CUDA graph depends on values: a graph repeats the branch that it has seen",
        "autoddp --cuda-graphs train.py compares outputs and gradients of a pass with those of your model, and uses no "
        "graph if they differ",
    )


def _of_the_network(node: Node, environment: Mapping[str, str] | None) -> Iterator[Point]:
    yield _ports(node)
    usable = [port for port in node.rdma if port.active is not False]
    points = [*_variables(node, usable, environment), _peer_memory(node), _memlock(node)]
    if usable:
        yield from points
        return
    idle = "no RDMA port is active" if node.rdma else "there is no RDMA device"
    for point in points:
        yield replace(point, state="not needed", found=f"{point.found}; {idle}", do="")


def _ports(node: Node) -> Point:
    what, expected = "RDMA ports", "each port with a cable is active"
    if not node.rdma:
        why = node.unknown.get("rdma", "no output tells of any")
        return Point(what, "not needed", f"none: {why}", "one where the cluster has InfiniBand or RoCE")
    found = ", ".join(map(_port, node.rdma))
    if all(port.active for port in node.rdma):
        return Point(what, "good", found, expected)
    unclear = not any(port.active is False for port in node.rdma)
    if unclear:
        return Point(what, "not looked at", f"{found}: nothing tells their state", expected, "see --ibv-devinfo")
    return Point(what, "mend", found, expected, "see why with ibstat, if a cable is in those that are not active")


def _port(port: RdmaPort) -> str:
    rate = f" {port.rate_gbps:g} Gbit/s" if port.rate_gbps else ""
    return f"{port.device}:{port.port} {port.fabric or 'RDMA'}{rate} {port.state or 'state not known'}"


def _variables(node: Node, usable: list[RdmaPort], environment: Mapping[str, str] | None) -> Iterator[Point]:
    devices = sorted({port.device for port in usable})
    hca, gid, off = "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE"
    timeout, level = "NCCL_IB_TIMEOUT", "NCCL_NET_GDR_LEVEL"
    wanted = rdma_settings(node.rdma, node.gids).get(gid)
    expected = {
        hca: f"not set, or names among {', '.join(devices)}" if devices else "not set",
        gid: f"{wanted[0]}: {wanted[1]}" if wanted else "not set: no address here asks for another than NCCL's choice",
        off: "not set, or 0",
        timeout: "not set",
        level: "not set: NCCL goes by the distance of NIC and GPU",
    }
    if environment is None:
        for name, text in expected.items():
            yield Point(name, "not looked at", "the variables of that machine's job are not in these outputs", text)
        return
    value = {name: environment.get(name, "").strip() for name in expected}
    unknown = absent(hca, value[hca], devices) if value[hca] else []
    wrong = {
        hca: f"correct it: no device that is active has a name such as {', '.join(unknown)}" if unknown else "",
        gid: f"set {gid}={wanted[0]}, as autoddp does for its jobs" if wanted and value[gid] != wanted[0] else "",
        off: f"unset {off}: gradients take TCP, although an RDMA port is active" if value[off] not in ("", "0") else "",
    }
    measured = "keep it only if a measurement stands behind it: autoddp bench"
    for name, text in expected.items():
        mends = wrong.get(name, "")
        kept = measured if value[name] and name in (timeout, level) else ""
        yield Point(name, "mend" if mends else "good", value[name] or "not set", text, mends or kept)


def _peer_memory(node: Node) -> Point:
    what, expected = "peer memory", "nvidia_peermem or dma-buf, so that a NIC reads a GPU's memory by itself"
    if UNTOLD in node.unknown and not node.gpus:
        return Point(what, "not looked at", node.unknown[UNTOLD], expected)
    if not node.gpus and node.host:
        return Point(what, "not needed", _no_gpu(node), expected)
    if node.gpudirect:
        return Point(what, "good", node.gpudirect, expected)
    if "gpudirect" in node.unknown:
        return Point(what, "not looked at", node.unknown["gpudirect"], expected)
    mends = "modprobe nvidia_peermem, or take NVIDIA's open kernel module, which has dma-buf"
    return Point(what, "mend", "neither", expected, mends)


def _memlock(node: Node) -> Point:
    what, expected, limit = "memlock", "no limit: RDMA pins the memory of its buffers", node.limits.memlock_bytes
    if limit is None:
        return Point(what, "not looked at", "the limit of that machine's processes is not in these outputs", expected)
    if limit < 0:
        return Point(what, "good", "no limit", expected)
    mends = "ulimit -l unlimited before the start, LimitMEMLOCK=infinity in slurmd's unit, or --ulimit memlock=-1"
    return Point(what, "mend", data_size(limit), expected, mends)


def _of_speed(environment: Mapping[str, str] | None) -> Iterator[Point]:
    name, expected = "NCCL_ALGO", "not set: NCCL chooses ring or tree by the size of a message"
    tries = "autoddp --trials 20 train.py tries the other one where it may gain, and autoddp bench measures sizes"
    if environment is None:
        yield Point(name, "not looked at", "the variables of that machine's job are not in these outputs", expected)
    else:
        value = environment.get(name, "").strip()
        yield Point(name, "good", value or "not set", expected, tries)
    yield Point(
        "the gain",
        "not looked at",
        "nothing is measured here",
        'each claim of a gain, such as "30 % faster", has a measurement on your job behind it',
        "autoddp --trials 20 train.py measures, and launches only what is surely faster",
    )


def _no_gpu(node: Node) -> str:
    return f"no GPU here ({node.unknown['gpus']})" if "gpus" in node.unknown else "no GPU here"
