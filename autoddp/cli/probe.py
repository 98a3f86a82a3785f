"""`autoddp probe`: what this node is made of and what to expect of it; or the same from another machine's outputs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from autoddp.cli.parser import Parser
from autoddp.errors import NothingReadable, UsageError
from autoddp.files import read_at_most
from autoddp.log import show_json
from autoddp.topology import Node, verdicts
from autoddp.topology.checklist import checklist
from autoddp.topology.nccl.conf import as_nccl_sees
from autoddp.topology.tool_outputs import SOURCES, Output, node_of
from autoddp.topology.wrappers import decoded, rejoined, unwrapped

_MOST = 256 * 2**20  # bytes of a file: the longest NCCL logs of big jobs are a tenth of this


def run(arguments: list[str]) -> int:
    """The exit code of `autoddp probe` with these arguments.

        run([])                                             # this node
        run(["--topo-matrix", "topo.txt", "--json"])        # another machine's, from `nvidia-smi topo -m`
        run(["--checklist"])                                # the points of published guides, looked at on this node

    With one file, --json prints what was read of it; with several, one object per option. AutoddpError for a file that
    cannot be read or of which nothing can be understood.
    """
    options = _parser().parse_args(arguments)
    for name, value in vars(options).items():
        if value == "":  # as of a variable that is not set; a drawing was left out, and a file was the current folder
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"probe: {option}: its value is empty: give {option} FILE, or leave it out")
    given = {name: place for name in SOURCES if (place := getattr(options, name)) is not None}
    if given:
        return _show_files({name: _read(name, place) for name, place in given.items()}, options)
    from autoddp.topology.probe import probe

    return _show_node(probe(), options)


def _show_node(node: Node, options: argparse.Namespace) -> int:
    found = verdicts(node)
    points = checklist(node, as_nccl_sees(os.environ)) if options.checklist else []
    if options.svg:
        _write_svg(options.svg, node)
    if options.json:
        more = {"checklist": [point.plain() for point in points]} if options.checklist else {}
        show_json(node.plain() | {"verdicts": [vars(verdict) for verdict in found]} | more)
    elif options.checklist:
        from autoddp.report.node_text import show_points

        show_points(points)
    else:
        from autoddp.report.node_text import show_node

        show_node(node, found)
    return 0


def _show_files(read: dict[str, Output], options: argparse.Namespace) -> int:
    node = node_of(read)
    if node is None and (options.svg or options.checklist):
        what = "--svg draws a node" if options.svg else "--checklist looks at a node"
        raise UsageError(f"probe: {what}: it needs --topo-matrix or --sysfs, or none of the files")
    if options.svg and node is not None:
        _write_svg(options.svg, node)
    plain = {name: output.plain() for name, output in read.items()}
    if options.checklist and node is not None:
        points = checklist(node, None)
        if options.json:
            show_json({"checklist": [point.plain() for point in points]})
        else:
            from autoddp.report.node_text import show_points

            show_points(points)
    elif options.json:
        show_json(next(iter(plain.values())) if len(plain) == 1 else plain)
    else:
        from autoddp.report.node_text import show_node, show_outputs

        if node is not None:
            show_node(node, verdicts(node, {}))
        show_outputs({name: facts for name, facts in plain.items() if name not in ("topo_matrix", "sysfs")})
    return 0


def _read(name: str, place: str) -> Output:
    """What is read of a file, or for --sysfs of a folder."""
    option, path = f"--{name.replace('_', '-')}", Path(place)
    if name == "sysfs" and not os.path.isdir(path):
        raise UsageError(f"probe: {option} {place}: not a folder; name one that holds a copy of /sys as sys/")
    try:
        if name == "sysfs":
            return SOURCES[name].read(path)
        content = read_at_most(path, _MOST + 1)
        if len(content) > _MOST:
            raise NothingReadable(f"larger than {_MOST >> 20} MiB; cut out the part that matters")
        return _read_text(SOURCES[name].read, unwrapped(decoded(content)))
    except NothingReadable as problem:
        raise NothingReadable(f"{option} {place}: {problem}") from None
    except OSError as problem:
        raise UsageError(f"probe: {option} {place}: {os.strerror(problem.errno or 0)}; name a readable file") from None


def _read_text(read: Callable[[str], Output], text: str) -> Output:
    """What is read of a text, or of the same with broken lines joined, where that leaves less unread."""
    found, problem = None, None
    for way in dict.fromkeys((rejoined(text), text)):
        try:
            other = read(way)
        except NothingReadable as unread:
            problem = problem or unread
            continue
        if found is None or _unread(other) < _unread(found):
            found = other
        if not _unread(found):
            break
    if found is None:
        assert problem is not None
        raise problem
    return found


def _unread(output: Output) -> int:
    return len(getattr(output, "missing", ()))


def _write_svg(place: str, node: Node) -> None:
    from autoddp.report.node_svg import svg
    from autoddp.report.svg import require_replaceable

    try:
        require_replaceable(Path(place), "probe: --svg")
        Path(place).write_text(svg(node), encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"probe: --svg {place}: {os.strerror(problem.errno or 0)}; name a file in a folder") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="autoddp probe",
        allow_abbrev=False,
        description="What this node is made of, how its GPUs and NICs are joined, which way gradients will take, and "
        "how fast that can be. With a file: the same from another machine's output.",
    )
    for name, source in SOURCES.items():
        metavar = "DIR" if name == "sysfs" else "FILE"
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=source.says)
    parser.add_argument(
        "--checklist",
        action="store_true",
        help="instead, what guides tell people to check for NCCL and InfiniBand: found, expected, what to do",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--svg", metavar="FILE", help="also draw the node into this file")
    return parser
