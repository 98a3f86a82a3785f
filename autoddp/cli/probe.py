"""`autoddp probe`: what this node is made of and what to expect of it; or the same from another machine's outputs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from autoddp.errors import NothingReadable, UsageError
from autoddp.topology import Node, verdicts
from autoddp.topology.tool_outputs import OUTPUTS, Output, node_of

_MOST = 256 * 2**20  # bytes of a file: the longest NCCL logs of big jobs are a tenth of this


def run(arguments: list[str]) -> int:
    """The exit code of `autoddp probe` with these arguments.

        run([])                                             # this node
        run(["--topo-matrix", "topo.txt", "--json"])        # another machine's, from `nvidia-smi topo -m`

    With one file, --json prints what was read of it; with several, one object per option. AutoddpError for a file that
    cannot be read or of which nothing can be understood.
    """
    options = _parser().parse_args(arguments)
    given = {name: getattr(options, name) for name in OUTPUTS if getattr(options, name) is not None}
    if given:
        return _show_files(given, options)
    from autoddp.topology.probe import probe

    return _show_node(probe(), options)


def _show_node(node: Node, options: argparse.Namespace) -> int:
    found = verdicts(node)
    if options.svg:
        _write_svg(options.svg, node)
    if options.json:
        print(json.dumps(node.plain() | {"verdicts": [vars(verdict) for verdict in found]}))
    else:
        from autoddp.report.topology import show_node

        show_node(node, found)
    return 0


def _show_files(given: dict[str, str], options: argparse.Namespace) -> int:
    read = {name: _read(OUTPUTS[name], name, place) for name, place in given.items()}
    node = node_of(read)
    if options.svg:
        if node is None:
            raise UsageError("probe: --svg draws a node: it needs --topo-matrix or --sysfs, or none of the files")
        _write_svg(options.svg, node)
    if options.json:
        plain = {name: output.plain() for name, output in read.items()}
        print(json.dumps(next(iter(plain.values())) if len(plain) == 1 else plain))
    else:
        from autoddp.report.tool_outputs import show_outputs
        from autoddp.report.topology import show_node

        if node is not None:
            show_node(node, verdicts(node, {}))
        show_outputs({name: output.plain() for name, output in read.items() if name not in ("topo_matrix", "sysfs")})
    return 0


def _read(reader: Callable[[Any], Output], name: str, place: str) -> Output:
    try:
        return reader(_content(name, place))
    except NothingReadable as problem:
        raise NothingReadable(f"{_option(name)} {place}: {problem}") from None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _content(name: str, place: str) -> Any:
    """The text of a file, or the folder for --sysfs."""
    option = _option(name)
    path = Path(place)
    if name == "sysfs":
        if not path.is_dir():
            raise UsageError(f"probe: {option} {place}: not a folder; name one that holds a copy of /sys as sys/")
        return path
    try:
        if path.stat().st_size > _MOST:
            raise NothingReadable(f"larger than {_MOST >> 20} MiB; cut out the part that matters")
        return path.read_bytes().decode(errors="replace")
    except OSError as problem:
        raise UsageError(f"probe: {option} {place}: {os.strerror(problem.errno or 0)}; name a readable file") from None


def _write_svg(place: str, node: Node) -> None:
    from autoddp.report.topology_svg import svg

    try:
        Path(place).write_text(svg(node), encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"probe: --svg {place}: {os.strerror(problem.errno or 0)}; name a file in a folder") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"probe: {message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="autoddp probe",
        allow_abbrev=False,
        description="What this node is made of, how its GPUs and NICs are joined, which way gradients will take, and "
        "how fast that can be. With a file: the same from another machine's output.",
    )
    add: Callable[..., Any] = parser.add_argument
    add("--topo-matrix", metavar="FILE", help="output of nvidia-smi topo -m")
    add("--p2p-status", metavar="FILE", help="output of nvidia-smi topo -p2p r")
    add("--gpu-list", metavar="FILE", help="output of nvidia-smi -L")
    add("--nccl-log", metavar="FILE", help="a log written under NCCL_DEBUG=INFO")
    add("--ibv-devinfo", metavar="FILE", help="output of ibv_devinfo, ibstat or ibstatus")
    add("--show-gids", metavar="FILE", help="output of show_gids")
    add("--nvlink-status", metavar="FILE", help="output of nvidia-smi nvlink -s")
    add("--sysfs", metavar="DIR", help="a folder that holds a copy of another machine's /sys, as sys/")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--svg", metavar="FILE", help="also draw the node into this file")
    return parser
