"""GPUs as the NVIDIA driver describes them, through NVML.

    facts = read_nvml()
    for fact, because in facts.unknown.items():
        print(f"{fact}: {because}")         # gpus.3.memory_bytes: nvmlDeviceGetMemoryInfo: Insufficient Permissions

Every fact is asked for by itself, so an old driver, or a GPU that has fallen off the bus, costs those facts only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from autoddp.topology.facts import Gpu, GpuPair, Relation
from autoddp.topology.nvml_calls import DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, NOT_SUPPORTED, Library, Refusal
from autoddp.topology.nvml_links import Links, bus_address, join, read_links

# Of nvml.h: nvmlGpuTopologyLevel_t (0 is two GPUs on one board) and nvmlGpuP2PStatus_t (6 is "unknown").
_RELATIONS: dict[int, Relation] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_PEER_ACCESS = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS"}
_READ = 0  # NVML_P2P_CAPS_INDEX_READ
_CLOSEST_NODE = 0  # NVML_AFFINITY_SCOPE_NODE
_CPU_WORDS = 64  # of 64 bits: 4096 CPUs
_NUMA_WORDS = 16  # 1024 NUMA nodes, as many as Linux can have


@dataclass(frozen=True)
class NvmlFacts:
    """What NVML told. A lost GPU keeps its place in `gpus`, empty, and is in no pair."""

    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    """driver, cuda (the newest that the driver runs), nvml."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Path of a fact, as in `gpus.3.memory_bytes` or `pairs.0.p2p` → why it could not be learned."""


def read_nvml() -> NvmlFacts:
    """All that NVML tells of this machine's GPUs; nothing but the reason, under `gpus`, where there is no driver.

    No driver makes it raise, but a broken one can keep it from returning: nvmlInit then hangs inside the kernel, where
    nothing in this process can interrupt it. Ask a program that can be given up on first (`autoddp.topology.smi.ask`).

    GPUs come in PCI order, all that this container was given: NVML knows nothing of CUDA_VISIBLE_DEVICES.
    """
    try:
        import pynvml
    except ImportError as problem:
        return NvmlFacts(unknown={"gpus": f"no NVIDIA driver: it cannot be asked without nvidia-ml-py ({problem})"})
    library = Library(pynvml)
    try:
        library.ask("nvmlInit")
    except Refusal as refusal:
        absent = refusal.code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED)
        return NvmlFacts(unknown={"gpus": f"{'no NVIDIA driver' if absent else 'the NVIDIA driver fails'}: {refusal}"})
    try:
        return _Reading(library).facts()
    finally:
        with suppress(Refusal):
            library.ask("nvmlShutdown")


class _Question(NamedTuple):
    """One fact and the call that tells it."""

    fact: str
    function: str
    read: Callable[[Any], Any]
    """NVML's answer → the fact; ValueError if it is none."""
    arguments: tuple[Any, ...] = ()
    where_unsupported: Any = None
    """The fact if NVML says "not supported", where that is an answer too."""


def _ones(words: Iterable[int]) -> list[int]:
    """The numbers of the bits that are set in a mask of 64-bit words, the lowest first."""
    return [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _listed(numbers: list[int]) -> str:
    """Sorted numbers as the kernel lists CPUs.

    >>> _listed([0, 1, 2, 8, 10, 11])
    '0-2,8,10-11'
    """
    there = set(numbers)
    starts = [n for n in numbers if n - 1 not in there]
    ends = [n for n in numbers if n + 1 not in there]
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))


def _cpus(words: Iterable[int]) -> str:
    if not (cpus := _ones(words)):
        raise ValueError("names no CPU")
    return _listed(cpus)


def _numa(words: Iterable[int]) -> int:
    nodes = _ones(words)
    if len(nodes) != 1:
        raise ValueError(f"names NUMA nodes {_listed(nodes)}, not one" if nodes else "names no NUMA node")
    return nodes[0]


def _named(names: Mapping[int, str]) -> Callable[[int], str]:
    def read(number: int) -> str:
        if number not in names:
            raise ValueError(f"answers {number}, which has no name")
        return names[number]

    return read


_OF_A_GPU = (
    _Question("name", "nvmlDeviceGetName", str),
    _Question("uuid", "nvmlDeviceGetUUID", str),
    _Question("bus", "nvmlDeviceGetPciInfo", bus_address),
    _Question("memory_bytes", "nvmlDeviceGetMemoryInfo", lambda memory: memory.total),
    _Question("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration", int),
    _Question("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", int),
    _Question("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration", int),
    _Question("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", int),
    # Not nvmlDeviceGetNumaNodeId, which is the node that a Grace machine makes of the GPU's own memory.
    _Question("numa", "nvmlDeviceGetMemoryAffinity", _numa, (_NUMA_WORDS, _CLOSEST_NODE)),
    _Question("cpus", "nvmlDeviceGetCpuAffinity", _cpus, (_CPU_WORDS,)),
    _Question("mig", "nvmlDeviceGetMigMode", lambda now_and_later: now_and_later[0] == 1, where_unsupported=False),
)

_OF_A_PAIR = (
    _Question("relation", "nvmlDeviceGetTopologyCommonAncestor", _named(_RELATIONS)),
    _Question("p2p", "nvmlDeviceGetP2PStatus", _named(_PEER_ACCESS), (_READ,)),
)

_OF_THE_DRIVER = (
    _Question("driver", "nvmlSystemGetDriverVersion", str),
    _Question("cuda", "nvmlSystemGetCudaDriverVersion", lambda version: f"{version // 1000}.{version % 1000 // 10}"),
    _Question("nvml", "nvmlSystemGetNVMLVersion", str),
)


class _Reading:
    """One pass over an initialised library; what is refused on the way gathers in `unknown`."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.unknown: dict[str, str] = {}

    def facts(self) -> NvmlFacts:
        versions = self.answers("versions", _OF_THE_DRIVER)
        handles = self.handles()
        gpus = tuple(
            Gpu(index) if handle is None else Gpu(index, **self.answers(f"gpus.{index}", _OF_A_GPU, handle))
            for index, handle in enumerate(handles)
        )
        reached = {index: handle for index, handle in enumerate(handles) if handle is not None}
        pairs = self.pairs(reached, {gpu.bus: gpu.index for gpu in gpus if gpu.bus})
        return NvmlFacts(gpus, pairs, versions, self.unknown)

    def answers(self, path: str, questions: Iterable[_Question], *subject: Any) -> dict[str, Any]:
        """Fact → answer, of the questions that were answered."""
        found = {}
        for question in questions:
            try:
                answer = self.library.ask(question.function, *subject, *question.arguments)
                found[question.fact] = question.read(answer)
            except Refusal as refusal:
                if refusal.code == NOT_SUPPORTED and question.where_unsupported is not None:
                    found[question.fact] = question.where_unsupported
                else:
                    self.unknown[f"{path}.{question.fact}"] = str(refusal)
            except ValueError as problem:  # also text that is not UTF-8, which pynvml decodes
                self.unknown[f"{path}.{question.fact}"] = f"{question.function}: {problem}"
        return found

    def handles(self) -> list[Any]:
        """NVML's handle of each GPU, None where it cannot be reached."""
        try:
            return [self.handle(index) for index in range(self.library.ask("nvmlDeviceGetCount"))]
        except Refusal as refusal:
            self.unknown["gpus"] = str(refusal)
            return []

    def handle(self, index: int) -> Any:
        try:
            return self.library.ask("nvmlDeviceGetHandleByIndex", index)
        except Refusal as refusal:
            self.unknown[f"gpus.{index}"] = str(refusal)
            return None

    def pairs(self, handles: Mapping[int, Any], addresses: Mapping[str, int]) -> tuple[GpuPair, ...]:
        links = {index: read_links(self.library, handle, addresses) for index, handle in handles.items()}
        found: list[GpuPair] = []
        for a, b in combinations(handles, 2):
            path = f"pairs.{len(found)}"
            answers = self.answers(path, _OF_A_PAIR, handles[a], handles[b])
            found.append(GpuPair(a, b, **answers, **self.nvlinks(path, a, b, links)))
        return tuple(found)

    def nvlinks(self, path: str, a: int, b: int, links: Mapping[int, Links]) -> dict[str, Any]:
        if refused := [f"GPU{gpu}: {links[gpu].refused}" for gpu in (a, b) if links[gpu].refused]:
            self.unknown[f"{path}.nvlinks"] = "; ".join(refused)
            return {}
        facts = join(a, b, links)
        for fact in (fact for fact, value in facts.items() if value is None):
            self.unknown[f"{path}.{fact}"] = "neither the driver nor the GPUs' compute capability tells"
        return facts
