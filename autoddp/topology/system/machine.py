"""Facts about the machine besides GPUs and networks: processor, NUMA nodes, limits of this process, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from autoddp.cpus import usable_cpus
from autoddp.topology.facts import Cpu, Limits, NumaNode
from autoddp.topology.system.files import entries, number, word

_ROOT = Path("/")
_CONTAINER_MARKS = re.compile(r"docker|kubepods|containerd|libpod|lxc")


def cpu(root: Path = _ROOT) -> Cpu:
    """The processor. Counts of cores are given for the machine this runs on only, not for a copy of another's files."""
    import psutil

    text = word(root / "proc/cpuinfo") or ""
    here = root == _ROOT
    return Cpu(
        model=_line(text, "model name") or (platform.processor() if here else ""),
        vendor=_line(text, "vendor_id") or ("ARM" if "CPU implementer" in text else ""),
        cores=psutil.cpu_count(logical=False) if here else None,
        threads=psutil.cpu_count() if here else None,
        usable=usable_cpus() if here else None,
    )


def _line(text: str, key: str) -> str:
    found = re.search(rf"^{key}[ \t]*:[ \t]*(.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""


def numa_nodes(root: Path = _ROOT) -> tuple[NumaNode, ...]:
    """The NUMA nodes, sorted by number; empty where sysfs shows none."""
    found = []
    for folder in entries(root / "sys/devices/system/node"):
        if re.fullmatch(r"node\d{1,4}", folder.name):
            total = re.search(r"MemTotal:\s+(\d{1,18}) kB", word(folder / "meminfo") or "")
            cpus = word(folder / "cpulist") or ""
            found.append(NumaNode(int(folder.name[4:]), cpus, int(total.group(1)) * 1024 if total else None))
    return tuple(sorted(found, key=lambda node: node.number))


def cpus(node: NumaNode) -> set[int]:
    """The CPU numbers in `node.cpus`, a list such as `0-23,48-71`; empty if it is not such a list."""
    found: set[int] = set()
    for part in filter(None, node.cpus.split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found


def usable_nodes(allowed: Collection[int]) -> list[tuple[int, set[int]]]:
    """The number of each NUMA node that has some of the `allowed` CPUs, and which; sorted by number."""
    found = [(node.number, cpus(node) & set(allowed)) for node in numa_nodes()]
    return [(number, near) for number, near in found if near]


def limits() -> Limits:
    """What the operating system grants this process."""
    import resource  # not above: a rank imports this module, and there the name may stand for a file of the user's

    return Limits(
        shm_bytes=_size_of(Path("/dev/shm")),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        cgroup_cpus=cgroup_cpus(),
        cgroup_memory_bytes=cgroup_memory(),
        container=in_container(),
    )


def _size_of(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _cgroup_folders(root: Path, controller: str = "") -> list[Path]:
    """The folders of this process's cgroup and of those above it: a limit of any of them holds.

    `controller`: that of version 1, where each has a hierarchy of its own; "" for version 2.
    """
    top = root / "sys/fs/cgroup" / controller
    rows = [line.split(":", 2) for line in (word(root / "proc/self/cgroup") or "").splitlines()]
    path = next((row[2] for row in rows if len(row) == 3 and controller in row[1].split(",")), "/")
    # A container may see the host's path, and has its own cgroup at the top: then the folders below that are not there.
    place = top / path.lstrip("/")
    return [place, *(parent for parent in place.parents if parent.is_relative_to(top))]


def cgroup_cpus(root: Path = _ROOT) -> float | None:
    """Cores that the cgroup of this process may keep busy at a time, as of a container with --cpus; None for all."""
    found = []
    for folder in _cgroup_folders(root):
        words = (word(folder / "cpu.max") or "").split()
        if len(words) == 2 and words[0] != "max":
            found.append(int(words[0]) / int(words[1]))
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = (number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota is not None and period is not None and quota > 0 and period > 0:
            found.append(quota / period)
    return min(found, default=None)


def usable_cores(root: Path = _ROOT) -> int:
    """CPU cores that the ranks of this host can keep busy: a container may show all, and have a part of their time."""
    quota = cgroup_cpus(root)
    return usable_cpus() if quota is None else max(1, min(usable_cpus(), int(quota)))


def cgroup_memory(root: Path = _ROOT) -> int | None:
    """Bytes that the processes of this process's cgroup may take together; None for all."""
    found = [number(folder / "memory.max") for folder in _cgroup_folders(root)]
    found += [number(folder / "memory.limit_in_bytes") for folder in _cgroup_folders(root, "memory")]
    # Version 1 writes "no limit" as the largest number of pages.
    return min((limit for limit in found if limit is not None and limit < 2**60), default=None)


def free_memory(root: Path = _ROOT) -> int:
    """Bytes that the processes of this host, and those of this process's cgroup, may still take."""
    import psutil

    found = [int(psutil.virtual_memory().available)]
    for folder in _cgroup_folders(root):
        found += _free_in(folder, "memory.max", "memory.current", "inactive_file")
    for folder in _cgroup_folders(root, "memory"):
        found += _free_in(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return min(found)


def _free_in(folder: Path, limit: str, usage: str, cache: str) -> list[int]:
    """Free bytes of one cgroup; no number where it sets no limit. Files that are only cached make room."""
    most, taken = number(folder / limit), number(folder / usage)
    if most is None or taken is None:
        return []
    cached = re.search(rf"^{cache} (\d{{1,18}})$", word(folder / "memory.stat") or "", re.MULTILINE)
    return [max(0, most - taken + (int(cached.group(1)) if cached else 0))]


def own_memory() -> int:
    """Bytes of this process's own memory, without the files and the shared memory that it maps."""
    import psutil

    info = psutil.Process().memory_info()
    return int(info.rss - info.shared)


def in_container() -> bool:
    """Whether files that container engines leave, or the names of cgroups, show that this is a container."""
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return True
    return bool(_CONTAINER_MARKS.search(word(Path("/proc/1/cgroup")) or ""))


def versions() -> dict[str, str]:
    """torch (with its CUDA, as in 2.13.0+cu128), NCCL's package, Python and kernel; what is not there is left out."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in importlib.metadata.distributions():
        name = (package.metadata["Name"] or "").lower()
        if name == "torch":
            found["torch"] = package.version
        elif re.fullmatch(r"nvidia-nccl-cu\d\d?", name):
            found["nccl"] = package.version
        elif re.fullmatch(r"nvidia-cuda-runtime(-cu\d\d?)?", name):
            found["cuda"] = package.version
    return found


def gpudirect(root: Path = _ROOT) -> Literal["nvidia_peermem", "dma-buf"] | None:
    """How a NIC can read a GPU's memory: by the peer memory module, or by dma-buf (open kernel module, Linux 5.12)."""
    if any((root / "sys/module" / name).is_dir() for name in ("nvidia_peermem", "nv_peer_mem")):
        return "nvidia_peermem"
    driver = word(root / "proc/driver/nvidia/version") or ""
    release = re.match(r"(\d{1,3})\.(\d{1,4})", word(root / "proc/sys/kernel/osrelease") or "")
    recent = release is not None and (int(release.group(1)), int(release.group(2))) >= (5, 12)
    return "dma-buf" if "Open Kernel Module" in driver and recent else None
