"""NVML's answers become facts: the real nvidia-ml-py over a C library with NVML's entry points, in its own process.

The machines are described in fake_nvml.c.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from autoddp.topology.facts import Gpu, GpuPair
from autoddp.topology.nvidia.nvml import Library, NvmlFacts, Refusal

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "libnvidia-ml.so.1"
PROGRAM = """
import json
from dataclasses import asdict
from autoddp.topology.nvidia.nvml import read_nvml
print(json.dumps(asdict(read_nvml())))
"""
NEAR = ("0-23,48-71", "24-47,72-95")
BUSES = ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db")
VERSIONS = {"driver": "550.54.15", "cuda": "12.4", "nvml": "12.550.54.15"}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library as of today in `new` and as of 2019 in `old`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the imitation of NVML with")
    folder = tmp_path_factory.mktemp("nvml")
    for age, options in {"new": [], "old": ["-DOLD"]}.items():
        (folder / age).mkdir()
        source, target = Path(__file__).with_name("fake_nvml.c"), folder / age / LIBRARY
        subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", target, source], check=True)
    return folder


def read(folder: Path, machine: str = "", *python: str) -> tuple[NvmlFacts, str]:
    """The facts of a machine, and what was said on stderr."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(folder), "FAKE_NVML": machine}
    done = subprocess.run(
        [sys.executable, *python, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    gpus = tuple(Gpu(**gpu) for gpu in found["gpus"])
    pairs = tuple(GpuPair(**pair) for pair in found["pairs"])
    return NvmlFacts(gpus, pairs, found["versions"], found["unknown"]), done.stderr


def gpu(index: int, name: str, **other: object) -> Gpu:
    """A GPU as all machines have it but for what is said."""
    socket = index // 4
    usual = {
        "uuid": f"GPU-{index}",
        "bus": f"0000:{BUSES[index]}:00.0",
        "memory_bytes": 48_000_000_000,
        "pcie_generation": 4,
        "pcie_width": 16,
        "pcie_generation_max": 4,
        "pcie_width_max": 16,
        "numa": socket,
        "cpus": NEAR[socket],
        "mig": False,
    }
    return Gpu(index, name, **{**usual, **other})  # type: ignore[arg-type]


def test_nvswitch(libraries: Path) -> None:
    facts, said = read(libraries / "new", "nvlink")
    assert facts.gpus == tuple(gpu(index, "NVIDIA H200") for index in range(8))
    joined = {"nvlinks": 18, "nvlink_version": 4, "nvlink_gbs": 478.116, "p2p": "OK"}
    assert facts.pairs == tuple(
        GpuPair(a, b, "SYS" if a < 4 <= b else "NODE", **joined)  # type: ignore[arg-type]
        for a, b in combinations(range(8), 2)
    )
    assert (facts.versions, facts.unknown) == (VERSIONS, {})
    assert said == "nvmlShutdown\n"


def pair_on_pcie(a: int, b: int) -> GpuPair:
    if a < 4 <= b:
        return GpuPair(a, b, "SYS", p2p="CNS")
    return GpuPair(a, b, "PIX" if a // 2 == b // 2 else "NODE", p2p="OK")


def test_pcie_only(libraries: Path) -> None:
    facts, _ = read(libraries / "new", "pcie")
    assert facts.gpus == tuple(
        gpu(
            index,
            "NVIDIA L40S",
            bus=f"{index // 4:04}:{BUSES[index]}:00.0",
            pcie_generation=1,
            pcie_width=8 if index == 3 else 16,
        )
        for index in range(8)
    )
    assert facts.pairs == tuple(pair_on_pcie(a, b) for a, b in combinations(range(8), 2))
    assert facts.unknown == {}


def test_bridges_a_link_down_and_mig(libraries: Path) -> None:
    facts, _ = read(libraries / "new", "mixed")
    names = ["NVIDIA RTX A6000" if index in (2, 3) else "NVIDIA A100 80GB PCIe" for index in range(8)]
    assert facts.gpus == tuple(gpu(index, name, mig=index == 6) for index, name in enumerate(names))
    bridged = {
        (0, 1): GpuPair(0, 1, "PXB", 12, 3, 300.0, "OK"),
        (2, 3): GpuPair(2, 3, "PXB", 3, 3, 42.188, "OK"),
        (4, 5): GpuPair(4, 5, "PXB", p2p="OK"),
        (6, 7): GpuPair(6, 7, "PXB", p2p="OK"),
    }
    assert facts.pairs == tuple(
        bridged.get((a, b), GpuPair(a, b, "SYS" if a < 4 <= b else "PHB", p2p="NS"))
        for a, b in combinations(range(8), 2)
    )
    assert facts.unknown == {}


def test_what_fails_is_missing_and_said(libraries: Path) -> None:
    facts, said = read(libraries / "new", "failing")
    missing = {
        2: {"pcie_width": None},
        3: {"memory_bytes": None},
        6: {"numa": None, "cpus": ""},
        7: {"numa": None},
    }
    assert facts.gpus == tuple(
        Gpu(5) if index == 5 else gpu(index, "NVIDIA L40S", **missing.get(index, {})) for index in range(8)
    )
    reached = [(a, b) for a, b in combinations(range(8), 2) if 5 not in (a, b)]
    odd = {(0, 4): GpuPair(0, 4, "SYS"), (6, 7): GpuPair(6, 7, "PIX", p2p="OK")}
    assert facts.pairs == tuple(odd.get(pair, pair_on_pcie(*pair)) for pair in reached)
    assert facts.unknown == {
        "gpus.2.pcie_width": "nvmlDeviceGetCurrPcieLinkWidth: Unknown Error",
        "gpus.3.memory_bytes": "nvmlDeviceGetMemoryInfo: Insufficient Permissions",
        "gpus.5": "nvmlDeviceGetHandleByIndex: GPU is lost",
        "gpus.6.numa": "nvmlDeviceGetMemoryAffinity: names no NUMA node",
        "gpus.6.cpus": "nvmlDeviceGetCpuAffinity: names no CPU",
        "gpus.7.numa": "nvmlDeviceGetMemoryAffinity: names NUMA nodes 0-1, not one",
        f"pairs.{reached.index((0, 4))}.p2p": "nvmlDeviceGetP2PStatus: answers 6, which has no name",
        **{
            f"pairs.{position}.nvlinks": "GPU1: nvmlDeviceGetNvLinkState: Unknown Error"
            for position, pair in enumerate(reached)
            if 1 in pair
        },
    }
    assert said == "nvmlShutdown\n"


def test_an_old_driver(libraries: Path) -> None:
    facts, _ = read(libraries / "old", "old")
    assert facts.gpus == tuple(
        gpu(index, "Tesla V100-SXM3-32GB", numa=None, cpus=NEAR[index // 2], mig=None) for index in range(4)
    )
    assert facts.pairs == tuple(
        GpuPair(a, b, "PIX" if (a, b) in ((0, 1), (2, 3)) else "SYS", links, 2, links * 25.0, "OK")
        for a, b in combinations(range(4), 2)
        for links in [5 if b == 3 else 6]
    )
    assert facts.unknown == {
        f"gpus.{index}.{fact}": f"{function}: Function Not Found"
        for index in range(4)
        for fact, function in (("numa", "nvmlDeviceGetMemoryAffinity"), ("mig", "nvmlDeviceGetMigMode"))
    }
    assert facts.versions == {"driver": "418.87", "cuda": "10.1", "nvml": "10.418.87"}


@pytest.mark.parametrize(
    ("machine", "because"),
    [
        ("unloaded", "no NVIDIA driver: nvmlInit: Driver Not Loaded"),
        ("broken", "the NVIDIA driver fails: nvmlInit: RM has detected an NVML/RM version mismatch."),
    ],
)
def test_nothing_starts(libraries: Path, machine: str, because: str) -> None:
    assert read(libraries / "new", machine) == (NvmlFacts(unknown={"gpus": because}), "")


def test_no_library(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_text("this hides the real one, if there is one, and cannot be loaded")
    facts, said = read(tmp_path)
    assert facts == NvmlFacts(unknown={"gpus": "no NVIDIA driver: nvmlInit: NVML Shared Library Not Found"})
    assert said == ""


def test_no_pynvml(tmp_path: Path) -> None:
    facts, said = read(tmp_path, "", "-S")  # without site-packages
    because = "no NVIDIA driver: it cannot be asked without nvidia-ml-py (No module named 'pynvml')"
    assert facts == NvmlFacts(unknown={"gpus": because})
    assert said == ""


def test_another_pynvml() -> None:
    other = Library(SimpleNamespace(NVMLError=ZeroDivisionError))
    with pytest.raises(Refusal, match="nvmlDeviceGetMigMode: the installed pynvml does not have it"):
        other.ask("nvmlDeviceGetMigMode", None)


def test_a_pynvml_that_knows_bytes_alone() -> None:
    """That of RAPIDS and of NVIDIA's containers, 11.4: "b'NVIDIA H200'" would be another GPU than a recipe's."""
    functions = {"nvmlDeviceGetName": lambda _gpu: b"NVIDIA H200", "nvmlDeviceGetHandleByUUID": ctypes.c_char_p}
    older = Library(SimpleNamespace(NVMLError=ZeroDivisionError, **functions))
    assert older.ask("nvmlDeviceGetName", None) == "NVIDIA H200"
    assert older.ask("nvmlDeviceGetHandleByUUID", "GPU-0").value == b"GPU-0"


@pytest.mark.parametrize(
    ("machine", "uuid", "clock"),
    [
        ("pcie", "GPU-0", (1980, 1980, "")),
        ("pcie", "GPU-3", (1005, 1980, "it is too hot")),
        ("failing", "GPU-7", (1980, 1980, "")),  # why it is slow is not told
        ("failing", "GPU-6", None),
        ("failing", "GPU-5", None),
        ("pcie", "MIG-0", None),
        ("unloaded", "GPU-0", None),
    ],
)
def test_the_clock_of_a_gpu(libraries: Path, machine: str, uuid: str, clock: tuple[int, int, str] | None) -> None:
    program = f"from autoddp.topology import read_gpu_clock; print(read_gpu_clock({uuid!r}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(libraries / "new"), "FAKE_NVML": machine}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    now, most, why = clock or (0, 0, "")
    expected = f"GpuClock(now={now}, most={most}, held_back={why!r})" if clock else "None"
    assert done.stdout.strip() == expected
