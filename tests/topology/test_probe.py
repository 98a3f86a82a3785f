"""One node from several sources: this machine as it is, and files and programs laid out as other machines have them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autoddp.topology import Fingerprint, Gpu, GpuPair, Node, fingerprint, interfaces, switches
from autoddp.topology.facts import Nic
from autoddp.topology.fingerprint import links_of, network_of
from autoddp.topology.nccl_log import read_nccl_log
from autoddp.topology.nvidia.matrix import read_matrix
from autoddp.topology.nvidia.nvml import NvmlFacts
from autoddp.topology.nvidia.smi import ask
from autoddp.topology.nvidia.smi_texts import read_gpu_list, read_p2p_status
from autoddp.topology.probe import machine, node_of_matrix, probe
from autoddp.topology.rdma.ports import RdmaPort
from autoddp.topology.rdma.texts import read_rdma_ports
from autoddp.topology.system.machine import cgroup_cpus, cgroup_memory, free_memory
from autoddp.topology.tool_outputs import SOURCES, node_of

MATRIX = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPIX\tSYS\tSYS\t0-23\t0
GPU1\tPIX\t X \tSYS\tSYS\t0-23\t0
GPU2\tSYS\tSYS\t X \tNV4\t24-47\t1
GPU3\tSYS\tSYS\tNV4\t X \t24-47\t1
"""


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine() -> None:
    node = probe()
    assert node.host
    assert node.cpu.usable == len(os.sched_getaffinity(0))
    assert node.limits.shm_bytes
    assert node.versions["torch"]
    assert all(because for because in node.unknown.values())
    if not os.path.isdir("/proc/driver/nvidia"):
        assert node.gpus == ()
        assert node.unknown["gpus"].startswith("no NVIDIA driver")


def test_a_smi_that_hangs_is_not_followed_by_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("autoddp.topology.probe.ask", partial(ask, time_limit=0.3))
    assert probe().unknown["gpus"] == "nvidia-smi did not answer within 0.3 s"


@pytest.mark.parametrize("name", ["kfd", "nvidia0"])
def test_gpus_are_not_denied_where_a_device_file_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    put(tmp_path, {f"dev/{name}": ""})
    monkeypatch.setattr("autoddp.topology.probe._ROOT", tmp_path)
    monkeypatch.setattr("autoddp.topology.probe._matrix", lambda: (None, "there is no nvidia-smi"))
    monkeypatch.setattr("autoddp.topology.probe.read_nvml", lambda: NvmlFacts(unknown={"gpus": "no NVIDIA driver"}))
    assert f"/dev/{name}" in probe().unknown["gpus.0"]


def test_a_matrix_alone_makes_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi is there (with a warning before its matrix), its library is not: as in some containers."""
    put(tmp_path, {"matrix": MATRIX, "nvidia-smi": f'#!/bin/sh\necho "Warning: old VBIOS"\ncat {tmp_path}/matrix\n'})
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    node = probe()
    assert [gpu.index for gpu in node.gpus] == [0, 1, 2, 3]
    assert node.sources["gpus"] == "nvidia-smi topo -m"
    assert node.pair(0, 1).relation == "PIX"


def test_matrix_to_node() -> None:
    node = node_of_matrix(read_matrix(MATRIX))
    assert node.gpus[2] == Gpu(2, cpus="24-47", numa=1)
    assert node.pair(3, 2) == GpuPair(2, 3, nvlinks=4)
    assert node.pair(1, 3) == GpuPair(1, 3, "SYS")
    assert [[gpu.index for gpu in group] for group in switches(node, node.gpus)] == [[0, 1], [2], [3]]
    assert links_of(node) == "NV4 PIX SYS"


def test_a_copy_of_another_machines_sysfs(tmp_path: Path) -> None:
    root = put(
        tmp_path,
        {
            "sys/class/net/lo/type": "772\n",
            "sys/class/net/eth0/type": "1\n",
            "sys/class/net/eth0/operstate": "up\n",
            "sys/class/net/eth0/speed": "100000\n",
            "sys/class/net/eth0/device/numa_node": "1\n",
            "sys/class/net/docker0/type": "1\n",
            "sys/class/net/docker0/bridge/bridge_id": "8000.0242\n",
            "sys/class/net/docker0/operstate": "down\n",
            "sys/class/net/bond0/type": "1\n",
            "sys/class/net/bond0/speed": "-1\n",
            "sys/devices/system/node/node0/cpulist": "0-31\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       65536 kB\n",
            "sys/devices/system/node/node10/cpulist": "32-63\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "proc/cpuinfo": "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\n",
        },
    )
    node = machine(root)
    assert [(nic.name, nic.kind, nic.up, nic.speed_mbit, nic.numa) for nic in node.nics] == [
        ("bond0", "virtual", None, None, None),
        ("docker0", "bridge", False, None, None),
        ("eth0", "physical", True, 100_000, 1),
    ]
    assert [(place.number, place.cpus, place.memory_bytes) for place in node.numa] == [
        (0, "0-31", 65536 * 1024),
        (10, "32-63", None),
    ]
    assert [(port.device, port.active, port.rate_gbps) for port in node.rdma] == [("mlx5_0", True, 400.0)]
    assert (node.cpu.vendor, node.cpu.model) == ("GenuineIntel", "Xeon")
    assert network_of(node) == "InfiniBand 1 x 400 Gbit/s"


NO_LIMIT = f"{2**63 - 4096}\n"
OF_A_STEP = "slurm/uid_1000/job_7/step_0"


@pytest.mark.parametrize(
    ("rows", "job"),
    [
        (f"9:memory:/{OF_A_STEP}\n4:cpu,cpuacct:/{OF_A_STEP}\n1:name=systemd:/\n0::/\n", "slurm/uid_1000/job_7/"),
        # A container sees the host's path, and its own cgroup at the top.
        ("9:memory:/docker/0f1e\n4:cpu,cpuacct:/docker/0f1e\n", ""),
        ("", ""),
    ],
)
def test_limits_of_a_cgroup_of_version_1(tmp_path: Path, rows: str, job: str) -> None:
    """Slurm has one below the top for each job, and for each step: what the job may take holds for its steps."""
    files = {"proc/self/cgroup": rows}
    for folder in dict.fromkeys(("", job, f"{OF_A_STEP}/")):
        is_jobs = folder == job
        files |= {
            f"sys/fs/cgroup/memory/{folder}memory.limit_in_bytes": f"{2**29}\n" if is_jobs else NO_LIMIT,
            f"sys/fs/cgroup/memory/{folder}memory.usage_in_bytes": f"{2**28}\n",
            f"sys/fs/cgroup/memory/{folder}memory.stat": "cache 4096\ntotal_inactive_file 4096\n",
            f"sys/fs/cgroup/cpu/{folder}cpu.cfs_quota_us": "350000\n" if is_jobs else "-1\n",
            f"sys/fs/cgroup/cpu/{folder}cpu.cfs_period_us": "100000\n",
        }
    root = put(tmp_path, files)
    assert (cgroup_cpus(root), cgroup_memory(root)) == (3.5, 2**29)
    assert free_memory(root) == 2**28 + 4096


def test_limits_of_a_cgroup_of_version_2(tmp_path: Path) -> None:
    root = put(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0\n",
            "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/memory.max": f"{2**29}\n",
            "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/memory.current": f"{2**28}\n",
            "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/memory.max": "max\n",
            "sys/fs/cgroup/system.slice/cpu.max": "200000 100000\n",
        },
    )
    assert (cgroup_cpus(root), cgroup_memory(root), free_memory(root)) == (2.0, 2**29, 2**28)


def test_no_source_denies_what_another_one_tells(tmp_path: Path) -> None:
    """A matrix that was cut, and a folder of /sys that names no RDMA device, beside sources that know them."""
    matrix = read_matrix(
        "\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tPIX\tS?S\tPIX\t0-23\t0\n"
        "GPU1\tPIX\t X \tSYS\tPIX\t0-23\t0\n"
        "GPU2\tS?S\tSYS\t X \tSYS\t24-47\t1\n"
        "NIC0\tPIX\tPIX\tSYS\t X \n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
    )
    folder = put(tmp_path, {"sys/class/net/eth0/type": "1\n", "proc/cpuinfo": "vendor_id\t: AuthenticAMD\n"})
    peers = read_p2p_status(" \tGPU0\tGPU1\tGPU2\nGPU0\tX\tOK\tCNS\nGPU1\tOK\tX\tOK\nGPU2\tCNS\tOK\tX\n")
    listed = read_gpu_list("GPU 0: NVIDIA A40 (UUID: GPU-00000000-1111-2222-3333-444444444444)\n")
    node = node_of({"topo_matrix": matrix, "sysfs": machine(folder), "p2p_status": peers, "gpu_list": listed})
    assert node is not None
    assert (node.cpu.vendor, [nic.name for nic in node.nics]) == ("AuthenticAMD", ["eth0"])
    assert ([port.device for port in node.rdma], node.near) == (["mlx5_0"], {"mlx5_0": (0, 1)})
    assert [(pair.a, pair.b, pair.relation, pair.p2p) for pair in node.pairs] == [
        (0, 1, "PIX", "OK"),
        (0, 2, None, "CNS"),
        (1, 2, "SYS", "OK"),
    ]
    assert ([gpu.name for gpu in node.gpus], node.gpus[2].numa) == (["NVIDIA A40", "", ""], 1)
    assert any("GPU links could not be read" in text for text in node.unknown.values())


def test_every_output_counts_whatever_others_are_there(tmp_path: Path) -> None:
    """ibv_devinfo tells no rates, a copy of /sys no GPUs, a matrix neither NCCL's version nor its ports' states."""
    folder = put(
        tmp_path,
        {
            "sys/class/net/eth0/type": "1\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        },
    )
    ports = read_rdma_ports(
        "hca_id:\tmlx5_0\n\tfw_ver:\t28.43.2566\n\tphys_port_cnt:\t1\n"
        "\t\tport:\t1\n\t\t\tstate:\tPORT_ACTIVE (4)\n\t\t\tlink_layer:\tInfiniBand\n"
    )
    listed = read_gpu_list("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-1111-2222-3333-444444444444)\n")
    log = read_nccl_log("h:1:2 [0] NCCL INFO NCCL version 2.27.7+cuda13.0\n")
    read_folder: Any = SOURCES["sysfs"].read
    node = node_of({"sysfs": read_folder(folder), "ibv_devinfo": ports, "gpu_list": listed, "nccl_log": log})
    assert node is not None
    assert [(port.device, port.rate_gbps, port.firmware) for port in node.rdma] == [
        ("mlx5_0", 400.0, "28.43.2566"),
        ("mlx5_1", None, None),
    ]
    assert [gpu.name for gpu in node.gpus] == ["NVIDIA H100 80GB HBM3"]
    assert node.versions["nccl"] == "2.27.7+cuda13.0"
    assert "gpudirect" in node.unknown
    put(folder, dict.fromkeys(("proc/driver/nvidia/version", "proc/sys/kernel/osrelease"), "5.15.0\n"))
    put(folder, {"sys/module/nvidia/version": "550.54\n"})
    assert "gpudirect" not in read_folder(folder).unknown
    assert "gpudirect" in (node_of({"topo_matrix": read_matrix(MATRIX)}) or Node("")).unknown


def test_peer_access_counts_of_gpus_that_only_their_list_names(tmp_path: Path) -> None:
    folder = put(tmp_path, {"sys/class/net/eth0/type": "1\n"})
    peers = read_p2p_status(" \tGPU0\tGPU1\nGPU0\tX\tCNS\nGPU1\tCNS\tX\n")
    uuid = "00000000-1111-2222-3333-44444444444"
    listed = read_gpu_list("".join(f"GPU {n}: NVIDIA A40 (UUID: GPU-{uuid}{n})\n" for n in range(2)))
    node = node_of({"sysfs": machine(folder), "p2p_status": peers, "gpu_list": listed})
    assert node is not None
    assert [(pair.a, pair.b, pair.p2p) for pair in node.pairs] == [(0, 1, "CNS")]


def test_an_empty_folder_is_an_empty_node(tmp_path: Path) -> None:
    node = machine(tmp_path)
    assert (node.nics, node.rdma, node.numa) == ((), (), ())


@pytest.mark.parametrize(
    ("nics", "rdma", "expected"),
    [
        ((Nic("a", up=True, addresses=("10.0.0.1",), speed_mbit=25_000),), (), "TCP 25 Gbit/s"),
        ((Nic("a", up=True, addresses=("10.0.0.1",)),), (), "TCP"),
        ((Nic("a", up=False, addresses=("10.0.0.1",)),), (), ""),
        ((Nic("docker0", kind="bridge", up=True, addresses=("172.17.0.1",)),), (), ""),
        ((), (RdmaPort("m", 1, "DOWN", link_layer="InfiniBand", rate_gbps=400.0),), ""),
        (
            (),
            tuple(RdmaPort(f"m{i}", 1, "ACTIVE", link_layer="Ethernet", rate_gbps=100.0) for i in range(2)),
            "RoCE 2 x 100 Gbit/s",
        ),
    ],
)
def test_the_network_in_words(nics: tuple[Nic, ...], rdma: tuple[RdmaPort, ...], expected: str) -> None:
    assert network_of(Node("", nics=nics, rdma=rdma)) == expected


@pytest.mark.parametrize(("ranks", "gbps"), [(1, 400.0), (4, 1600.0), (8, 3200.0), (16, 3400.0)])
def test_no_more_ports_are_due_than_ranks_can_use(ranks: int, gbps: float) -> None:
    """One rank on each of two hosts had its 400 Gbit/s, and was told that its link is slow."""
    assert Fingerprint(rdma_ports=(400.0,) * 8 + (200.0,)).rdma_gbps(ranks) == gbps


def test_this_machines_fingerprint_is_repeatable() -> None:
    assert fingerprint() == fingerprint()
    assert "lo" not in [nic.name for nic in interfaces()]
