"""GPUs as the NVIDIA driver describes them, through NVML.

    facts = read_nvml()
    for fact, because in facts.unknown.items():
        print(f"{fact}: {because}")         # gpus.3.memory_bytes: nvmlDeviceGetMemoryInfo: Insufficient Permissions

Every fact is asked for by itself, so an old driver, or a GPU that has fallen off the bus, costs those facts only.

NVLinks into an NVSwitch count for every pair of GPUs that has some. The switches of a node are taken as one: they are
wired so that a GPU reaches any other with all its links, over whichever switch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from autoddp.topology.facts import Gpu, GpuPair, Relation

# Of nvmlReturn_t; the numbers of nvml.h do not change.
_INVALID_ARGUMENT, _NOT_SUPPORTED, _DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND = 2, 3, 9, 12

# Of nvml.h: nvmlGpuTopologyLevel_t (0 is two GPUs on one board) and nvmlGpuP2PStatus_t (6 is "unknown").
_RELATIONS: dict[int, Relation] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_PEER_ACCESS = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS"}
_READ = 0  # NVML_P2P_CAPS_INDEX_READ
_CLOSEST_NODE = 0  # NVML_AFFINITY_SCOPE_NODE
_CPU_WORDS = 64  # of 64 bits: 4096 CPUs
_NUMA_WORDS = 16  # 1024 NUMA nodes, as many as Linux can have

_SWITCH = -1  # as the far end of a link, beside the numbers of GPUs
_MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS; no GPU has them all, and NVML refuses the numbers a GPU does not have
_UP = 1  # NVML_FEATURE_ENABLED
_GPU_TYPE, _NPU_TYPE, _SWITCH_TYPE = 0, 1, 2  # NVML_NVLINK_DEVICE_TYPE_*

# NVLink version and GB/s of one link in one direction, by compute capability. Not by nvmlDeviceGetNvLinkVersion: it
# answers with the number of an enum, and drivers count that otherwise than nvml.h (an H100 says 7, there 5.0).
_KNOWN: dict[tuple[int, int], tuple[int, float]] = {
    (6, 0): (1, 20.0),
    (7, 0): (2, 25.0),
    (7, 5): (2, 25.0),
    (8, 0): (3, 25.0),
    (8, 6): (3, 14.0625),  # A40, A6000, RTX 3090: 56.25 GB/s over the four links of a bridge
    (9, 0): (4, 25.0),
    (10, 0): (5, 50.0),
    (10, 3): (5, 50.0),
}

_SPEED_OF_LINK, _SPEED_OF_ALL = 164, 90  # NVML_FI_DEV_NVLINK_GET_SPEED, _SPEED_MBPS_COMMON: MB/s, one direction
_VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # nvmlValueType_t → member of the union

_OF_PROCESSORS = 1  # NVML_CLOCK_SM
_HELD_BACK = {
    0x40: "it is too hot",  # nvmlClocksThrottleReasonHwThermalSlowdown
    0x20: "it is too hot",  # …SwThermalSlowdown
    0x80: "its power supply asks for it",  # …HwPowerBrakeSlowdown
    0x08: "the hardware slows it down",  # …HwSlowdown
    0x04: "it is at its power limit",  # …SwPowerCap
    0x02: "its clock was set by nvidia-smi",  # …ApplicationsClocksSetting
}
"""Bits of nvmlDeviceGetCurrentClocksThrottleReasons, the strongest first. Idling is no reason."""


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
    nothing in this process can interrupt it. Ask a program that can be given up on first (`smi.ask`).

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
        absent = refusal.code in (_LIBRARY_NOT_FOUND, _DRIVER_NOT_LOADED)
        return NvmlFacts(unknown={"gpus": f"{'no NVIDIA driver' if absent else 'the NVIDIA driver fails'}: {refusal}"})
    try:
        return _Reading(library).facts()
    finally:
        with suppress(Refusal):
            library.ask("nvmlShutdown")


@dataclass(frozen=True)
class GpuClock:
    """The clock of a GPU's processors, in MHz."""

    now: int
    most: int
    held_back: str = ""
    """Why it is not faster, as a sentence without a period; "" if nothing keeps it, or the driver does not tell."""


def read_gpu_clock(uuid: str) -> GpuClock | None:
    """The clock of the GPU of this UUID ("GPU-…"); None where there is no driver, or it does not tell."""
    try:
        import pynvml
    except ImportError:
        return None
    library = Library(pynvml)
    try:
        library.ask("nvmlInit")
    except Refusal:
        return None
    try:
        gpu = library.ask("nvmlDeviceGetHandleByUUID", uuid)
        now = int(library.ask("nvmlDeviceGetClockInfo", gpu, _OF_PROCESSORS))
        most = int(library.ask("nvmlDeviceGetMaxClockInfo", gpu, _OF_PROCESSORS))
        reasons = int(library.try_to_ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu) or 0)
    except Refusal:
        return None
    finally:
        with suppress(Refusal):
            library.ask("nvmlShutdown")
    return GpuClock(now, most, next((why for bit, why in _HELD_BACK.items() if reasons & bit), ""))


class Refusal(Exception):
    """NVML gave no answer. The text says which function and why; `code` is its nvmlReturn_t, None without a call."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class Library:
    """NVML behind the module `pynvml`, which the caller imports.

        library = Library(pynvml)
        library.ask("nvmlDeviceGetCount")

    By name, because the module may be another than ours: the abandoned PyPI package `pynvml` provides one too, which
    hides that of nvidia-ml-py and lacks what came later.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def ask(self, function: str, *arguments: Any) -> Any:
        """What the function returns; Refusal if the driver or its library refuses, or the module does not have it."""
        found = getattr(self._module, function, None)
        if found is None:
            raise Refusal(f"{function}: the installed pynvml does not have it")
        # The abandoned package before 11.5 takes and gives bytes alone; nvidia-ml-py takes them too, and gives texts.
        given = [one.encode() if isinstance(one, str) else one for one in arguments]
        try:
            answer = found(*given)
        except self._module.NVMLError as problem:
            raise Refusal(f"{function}: {problem}", problem.value) from None
        return answer.decode() if isinstance(answer, bytes) else answer

    def try_to_ask(self, function: str, *arguments: Any) -> Any:
        """What the function returns; None instead of Refusal, for functions that an old driver does not know."""
        try:
            return self.ask(function, *arguments)
        except Refusal:
            return None


class _Question(NamedTuple):
    """One fact and the call that tells it."""

    fact: str
    function: str
    read: Callable[[Any], Any]
    """NVML's answer → the fact; ValueError if it is none, KeyError if it is a number without a name."""
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


def _bus_address(pci: Any) -> str:
    """NVML's nvmlPciInfo_t as sysfs writes it: `0000:0f:00.0`."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


_OF_A_GPU = (
    _Question("name", "nvmlDeviceGetName", str),
    _Question("uuid", "nvmlDeviceGetUUID", str),
    _Question("bus", "nvmlDeviceGetPciInfo", _bus_address),
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
    _Question("relation", "nvmlDeviceGetTopologyCommonAncestor", _RELATIONS.__getitem__),
    _Question("p2p", "nvmlDeviceGetP2PStatus", _PEER_ACCESS.__getitem__, (_READ,)),
)

_OF_THE_DRIVER = (
    _Question("driver", "nvmlSystemGetDriverVersion", str),
    _Question("cuda", "nvmlSystemGetCudaDriverVersion", lambda version: f"{version // 1000}.{version % 1000 // 10}"),
    _Question("nvml", "nvmlSystemGetNVMLVersion", str),
)


@dataclass(frozen=True)
class _Links:
    """The active NVLinks of one GPU."""

    ends: Mapping[int, int] = field(default_factory=dict)
    """GPU at the far end, or _SWITCH → number of links."""
    version: int | None = None
    gbs: float | None = None
    """GB/s of one link in one direction."""
    refused: str = ""
    """Why nothing could be learned, if so."""


def _join(a: int, b: int, links: Mapping[int, _Links]) -> dict[str, Any]:
    """The NVLinks over which GPUs a and b reach each other, as GpuPair names such facts; empty if there are none.

    Through switches the GPU with fewer links decides. A link between two GPUs counts if one of them tells of it.
    """
    one, other = links[a], links[b]
    count = max(one.ends.get(b, 0), other.ends.get(a, 0)) + min(one.ends.get(_SWITCH, 0), other.ends.get(_SWITCH, 0))
    if not count:
        return {}
    version = None if one.version is None or other.version is None else min(one.version, other.version)
    gbs = None if one.gbs is None or other.gbs is None else round(count * min(one.gbs, other.gbs), 3)
    return {"nvlinks": count, "nvlink_version": version, "nvlink_gbs": gbs}


def _read_links(library: Library, gpu: Any, addresses: Mapping[str, int]) -> _Links:
    """The links of a GPU, given its NVML handle and the numbers of all GPUs by PCI address.

    One link that is up and does not tell where it leads is a refusal: a count without it would be a guess.
    """
    try:
        up = [link for link in range(_MOST_LINKS) if _is_up(library, gpu, link)]
        ends = Counter(end for link in up if (end := _far_end(library, gpu, link, addresses)) is not None)
    except Refusal as refusal:
        return _Links(refused=str(refusal))
    if not ends:
        return _Links()
    capability = library.try_to_ask("nvmlDeviceGetCudaComputeCapability", gpu)
    version, usual = _KNOWN.get(tuple(capability or ()), (None, None))
    return _Links(ends, version, _told(library, gpu, up[0]) or usual)


def _is_up(library: Library, gpu: Any, link: int) -> bool:
    try:
        return bool(library.ask("nvmlDeviceGetNvLinkState", gpu, link) == _UP)
    except Refusal as refusal:
        if refusal.code in (_NOT_SUPPORTED, _INVALID_ARGUMENT):  # a GPU without NVLink, or without that many
            return False
        raise


def _far_end(library: Library, gpu: Any, link: int, addresses: Mapping[str, int]) -> int | None:
    """A GPU's number, _SWITCH, or None for what is neither: a CPU, or a GPU that this container was not given."""
    kind = library.try_to_ask("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link)
    if kind == _SWITCH_TYPE:  # whose address may be hidden in a virtual machine, so it is not asked for
        return _SWITCH
    address = _bus_address(library.ask("nvmlDeviceGetNvLinkRemotePciInfo", gpu, link))
    if address in addresses:
        return addresses[address]
    return None if kind in (_GPU_TYPE, _NPU_TYPE) else _SWITCH


def _told(library: Library, gpu: Any, link: int) -> float | None:
    """GB/s of a link as the driver tells it; None if this driver does not."""
    questions = [(_SPEED_OF_LINK, link), (_SPEED_OF_ALL, 0)]
    for value in library.try_to_ask("nvmlDeviceGetFieldValues", gpu, questions) or ():
        if value.nvmlReturn == 0 and value.valueType < len(_VALUE_TYPES):
            speed = getattr(value.value, _VALUE_TYPES[value.valueType])
            if speed > 0:
                return float(speed) / 1000
    return None


class _Reading:
    """Reads everything from an initialised library once; what is refused is collected in `unknown`."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.unknown: dict[str, str] = {}

    def facts(self) -> NvmlFacts:
        versions = self.answers("versions", _OF_THE_DRIVER)
        count = self.ask("gpus", "nvmlDeviceGetCount") or 0
        handles = [self.ask(f"gpus.{index}", "nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        gpus = [
            Gpu(index) if handle is None else Gpu(index, **self.answers(f"gpus.{index}", _OF_A_GPU, handle))
            for index, handle in enumerate(handles)
        ]
        reached = {index: handle for index, handle in enumerate(handles) if handle is not None}
        pairs = self.pairs(reached, {gpu.bus: gpu.index for gpu in gpus if gpu.bus})
        return NvmlFacts(tuple(gpus), pairs, versions, self.unknown)

    def ask(self, path: str, function: str, *arguments: Any) -> Any:
        """The answer; None if it is refused, which is noted under `path`."""
        try:
            return self.library.ask(function, *arguments)
        except Refusal as refusal:
            self.unknown[path] = str(refusal)
            return None

    def answers(self, path: str, questions: Iterable[_Question], *subject: Any) -> dict[str, Any]:
        """Fact → answer, of the questions that were answered."""
        found = {}
        for question in questions:
            try:
                answer = self.library.ask(question.function, *subject, *question.arguments)
                found[question.fact] = question.read(answer)
            except Refusal as refusal:
                if refusal.code == _NOT_SUPPORTED and question.where_unsupported is not None:
                    found[question.fact] = question.where_unsupported
                else:
                    self.unknown[f"{path}.{question.fact}"] = str(refusal)
            except KeyError as number:
                self.unknown[f"{path}.{question.fact}"] = f"{question.function}: answers {number}, which has no name"
            except ValueError as problem:  # also text that is not UTF-8, which pynvml decodes
                self.unknown[f"{path}.{question.fact}"] = f"{question.function}: {problem}"
        return found

    def pairs(self, handles: Mapping[int, Any], addresses: Mapping[str, int]) -> tuple[GpuPair, ...]:
        links = {index: _read_links(self.library, handle, addresses) for index, handle in handles.items()}
        found: list[GpuPair] = []
        for a, b in combinations(handles, 2):
            path = f"pairs.{len(found)}"
            answers = self.answers(path, _OF_A_PAIR, handles[a], handles[b])
            if refused := [f"GPU{gpu}: {links[gpu].refused}" for gpu in (a, b) if links[gpu].refused]:
                self.unknown[f"{path}.nvlinks"] = "; ".join(refused)
            else:
                answers |= (joined := _join(a, b, links))
                for fact in (fact for fact, value in joined.items() if value is None):
                    self.unknown[f"{path}.{fact}"] = "neither the driver nor the GPUs' compute capability tells"
            found.append(GpuPair(a, b, **answers))
        return tuple(found)
