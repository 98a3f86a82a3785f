"""A node in lines of text: what stands where, how the GPUs are joined, what to expect; and what tools' outputs said."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from autoddp.log import WIDTH, printable, show, wrapped
from autoddp.tables import LITERAL, Harmless, grid, text_of, width_of_stdout
from autoddp.topology import Gpu, GpuPair, Nic, Node, NumaNode, RdmaPort, Verdict, switches
from autoddp.topology.checklist import Point
from autoddp.units import data_size

_NETWORK = "bold magenta"
_LABEL = 12  # columns of a point's label, with what stands around it
_PLAIN_WIDTH = 160  # columns of a log file
_NOTHING: tuple[Any, ...] = (None, "", [])  # what is not shown
_COLOURS = {"NV": "green", "PIX": "cyan", "PXB": "blue", "PHB": "yellow", "NODE": "dark_orange", "SYS": "red"}


def show_node(node: Node, verdicts: Sequence[Verdict]) -> None:
    """Prints what `autoddp probe` shows of a node: in colour on a terminal, else plain and 160 columns wide."""
    if sys.stdout is None or not sys.stdout.isatty():  # FORCE_COLOR, which services set, makes no terminal of a file
        show(node_text(node, verdicts))
        return
    console = Console(width=width_of_stdout(), **LITERAL)
    for part in _parts(node, verdicts):
        console.print(Harmless(part))


def node_text(node: Node, verdicts: Sequence[Verdict]) -> str:
    """A node as plain text, 160 columns wide."""
    return text_of(_parts(node, verdicts), _PLAIN_WIDTH)


def _parts(node: Node, verdicts: Sequence[Verdict]) -> list[RenderableType]:
    return [_tree(node), *_matrix(node), *_facts(node), *_verdicts(verdicts), *_unknown(node)]


def link_word(pair: GpuPair) -> str:
    """The link as nvidia-smi writes it: NV12, PIX, SYS; `?` if nothing is known."""
    return f"NV{pair.nvlinks}" if pair.nvlinks else pair.relation or "?"


def colour(word: str) -> str:
    """The colour of a link's class."""
    return _COLOURS.get("NV" if word.startswith("NV") else word, "default")


def _tree(node: Node) -> RenderableType:
    tree = Tree(Text(node.host or "a node"))
    places = {place.number: place for place in node.numa}
    known = {gpu.numa for gpu in node.gpus} | {nic.numa for nic in node.nics} | {port.numa for port in node.rdma}
    numbers = {*places, *(number for number in known if number is not None)}
    only = next(iter(numbers)) if len(numbers) == 1 else None
    for number in sorted(numbers):
        branch = tree.add(_numa(places.get(number, NumaNode(number, ""))))
        _add_devices(branch, node, {number, None} if number == only else {number})
    if only is None and None in known:
        _add_devices(tree.add("NUMA node not known, or none") if numbers else tree, node, {None})
    return tree


def _numa(place: NumaNode) -> str:
    cpus = f": CPUs {place.cpus}" if place.cpus else ""
    return f"NUMA {place.number}{cpus}" + (f", {data_size(place.memory_bytes)}" if place.memory_bytes else "")


def _add_devices(branch: Tree, node: Node, numbers: set[int | None]) -> None:
    """The devices of these NUMA nodes. None: devices without one, as virtual interfaces or GPUs of an old driver."""
    _add_gpus(branch, node, [gpu for gpu in node.gpus if gpu.numa in numbers])
    for nic in node.nics:
        if nic.numa in numbers:
            branch.add(_nic(node, nic))
    for port in node.rdma:
        if port.numa in numbers:
            branch.add(_rdma(node, port))


def _add_gpus(branch: Tree, node: Node, gpus: list[Gpu]) -> None:
    for group in switches(node, gpus):
        place = branch.add("PCIe switch") if len(group) > 1 else branch
        for gpu in group:
            place.add(_gpu(gpu))


def _gpu(gpu: Gpu) -> Text:
    generation = gpu.pcie_generation_max or gpu.pcie_generation
    most = f" of ×{gpu.pcie_width_max}" if gpu.pcie_width_max and gpu.pcie_width_max != gpu.pcie_width else ""
    return _device(
        (f"GPU{gpu.index}", "bold green"),
        gpu.name,
        gpu.memory_bytes and data_size(gpu.memory_bytes),
        generation and f"PCIe {generation} ×{gpu.pcie_width}{most}",
        gpu.mig and "MIG",
        gpu.cpus and f"CPUs {gpu.cpus}",
    )


def _nic(node: Node, nic: Nic) -> Text:
    state = {True: "up", False: "down", None: "state not known"}[nic.up]
    speed, route = nic.speed_mbit and f"{nic.speed_mbit / 1e3:g} Gbit/s", nic.routed and "default route"
    addresses = ", ".join(nic.addresses)
    return _device((nic.name, _NETWORK), nic.kind, nic.driver, state, speed, addresses, route, _near(node, nic.name))


def _rdma(node: Node, port: RdmaPort) -> Text:
    layer, state = "RoCE" if port.link_layer == "Ethernet" else port.link_layer, port.state or "state not known"
    rate = port.rate_gbps and f"{port.rate_gbps:g} Gbit/s"
    count = sum((gid.device, gid.port) == (port.device, port.port) for gid in node.gids)
    name, near = (f"{port.device}:{port.port}", _NETWORK), _near(node, port.device)
    return _device(name, f"RDMA {layer or state}", layer and state, rate, count and f"{count} GIDs", near)


def _device(name: tuple[str, str], *parts: object) -> Text:
    """The name in its style, and those parts that say something."""
    return Text.assemble(name, "  ", ", ".join(str(part) for part in parts if part))


def _near(node: Node, device: str) -> str:
    gpus = ", ".join(f"GPU{number}" for number in node.near.get(device, ()))
    return gpus and f"near {gpus}"


def _matrix(node: Node) -> list[RenderableType]:
    if len(node.gpus) < 2:
        return []
    return [_title("how the GPUs are joined"), _Matrix(node)]


class _Matrix:
    """The links between GPUs: one table, or several below each other where the terminal has too few columns.

    rich would take columns from each word, and NV12, PIX and PXB would become N… and P….
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        numbers = [gpu.index for gpu in self._node.gpus]
        width = len(f"GPU{max(numbers)}") + 2  # of a column; no word of a link is longer
        at_once = max(1, options.max_width // width - 1)
        for begin in range(0, len(numbers), at_once):
            yield self._table(numbers, numbers[begin : begin + at_once])

    def _table(self, rows: Sequence[int], columns: Sequence[int]) -> Table:
        table = Table(box=None, padding=(0, 1))
        for name in ("", *(f"GPU{number}" for number in columns)):
            table.add_column(name)
        for a in rows:
            words = ["X" if a == b else link_word(self._node.pair(a, b)) for b in columns]
            table.add_row(f"GPU{a}", *(Text(word, style=colour(word)) for word in words))
        return table


def _title(text: str) -> Text:
    return Text(text, style="italic")


def _facts(node: Node) -> list[RenderableType]:
    limits, cpu = node.limits, node.cpu
    said = [
        ("CPU", f"{cpu.model}, {cpu.cores} cores, {cpu.usable} usable" if cpu.usable else cpu.model),
        ("/dev/shm", data_size(limits.shm_bytes) if limits.shm_bytes is not None else ""),
        ("memlock", _memlock(limits.memlock_bytes)),
        ("cgroup CPUs", f"{limits.cgroup_cpus:g}" if limits.cgroup_cpus else ""),
        ("cgroup memory", data_size(limits.cgroup_memory_bytes) if limits.cgroup_memory_bytes else ""),
        ("container", {True: "yes", False: "no", None: ""}[limits.container]),
        ("GPUDirect", node.gpudirect or ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in node.versions.items())),
        ("sources", ", ".join(f"{fact}: {source}" for fact, source in node.sources.items())),
    ]
    told = [(name, text) for name, text in said if text]
    return [grid(told)] if told else []


def _memlock(value: int | None) -> str:
    if value is None:
        return ""
    return "no limit" if value < 0 else data_size(value)


def _verdicts(verdicts: Sequence[Verdict]) -> list[RenderableType]:
    if not verdicts:
        return []
    table = Table(box=None, padding=(0, 1))
    for name in ("between", "transport", "expected bus bandwidth", "why", "what holds it back"):
        table.add_column(name, overflow="fold")  # else rich cuts what is longer, such as NCCL_P2P_LEVEL=SYS
    alike = sorted(verdicts, key=lambda verdict: (verdict.between == "nodes", *_likeness(verdict)))
    for _, group in groupby(alike, key=_likeness):
        same = list(group)
        between = ", ".join(verdict.between for verdict in same)
        first = same[0]
        table.add_row(between, first.transport or "?", first.expected, first.why, first.holds_back)
    return [_title("what to expect"), table]


def _likeness(verdict: Verdict) -> tuple[str, ...]:
    return verdict.transport, verdict.expected, verdict.why, verdict.holds_back


def _unknown(node: Node) -> list[RenderableType]:
    return [Text(f"{fact}: could not be learned, because {why}") for fact, why in node.unknown.items()]


def show_points(points: Sequence[Point]) -> None:
    """Prints a checklist, in 80 columns: for each point its state, what was found and expected, and what to do."""
    for point in points:
        show(f"{point.what}: {point.state}")
        for label, text in (("found", point.found), ("expected", point.expected), ("do", point.do)):
            lines = wrapped(text, WIDTH - _LABEL) if text else []
            for number, line in enumerate(lines):
                show(f"  {'' if number else label:<{_LABEL - 2}}{line}")


def show_outputs(read: Mapping[str, Mapping[str, Any]]) -> None:
    """Another machine's outputs, on stdout: each under its name, with one line for each fact that is known."""
    for name, facts in read.items():
        show(f"{name.replace('_', ' ')}:")
        for fact, value in facts.items():
            for line in _lines(fact.replace("_", " "), value):
                show(f"  {printable(line)}")


def _lines(label: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{label} {key}: {_short(part)}" for key, part in value.items()]
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        return [", ".join(f"{k} {_short(v)}" for k, v in row.items() if v not in _NOTHING) for row in value]
    return [] if value in (*_NOTHING, ()) else [f"{label}: {_short(value)}"]


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    is_switch = value is None or isinstance(value, bool)
    return {True: "yes", False: "no", None: "not known"}[value] if is_switch else str(value)
