"""`autoddp bench`: its command line, and the job that measures, which is started on the user's hosts like any other."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from autoddp.attempts.keeper import Keeper
from autoddp.bench import BenchResult, Settings, sizes
from autoddp.commandline.parsers import meant_by, option_names
from autoddp.commandline.place import require_master, settle
from autoddp.commandline.words import given_to_torchrun
from autoddp.errors import JobFailed, UsageError
from autoddp.hosts.agreement import agree
from autoddp.log import show_exactly
from autoddp.network.own_network import Network
from autoddp.processes.signals import signals_end_tuning
from autoddp.processes.silence import awaiting
from autoddp.runs.folder import PREFIX, temporary_folder
from autoddp.runs.usual_folders import usual_folders
from autoddp.torchrun.jobs import run_own_job
from autoddp.torchrun.options import (
    ending_signals,
    node_range,
    nodes_and_ranks,
    require_job_options,
    require_rendezvous,
    torchrun_parser,
)
from autoddp.units import byte_count, seconds

MODULE = "autoddp.worker.bench"
T = TypeVar("T")


@dataclass(frozen=True)
class BenchRequest:
    """One command line, parsed."""

    torchrun: argparse.Namespace
    """What torchrun's parser makes of its part; the script is our module."""
    settings: Settings
    json: bool
    svg: Path | None
    output: Path
    says: str = ""
    """A line for the user: what a cluster tells of this node's place."""


def parse(words: Sequence[str]) -> BenchRequest:
    """Parse the words after `autoddp bench`; UsageError of one line for those that make no sense."""
    if "--" in words:
        raise UsageError("bench: takes no script, so nothing can follow `--`")
    own, rest = own_parser().parse_known_args(list(words))
    parser = torchrun_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    torchrun = parser.parse_args([*rest, "--module", MODULE])
    if torchrun.training_script != MODULE:
        raise UsageError(f"bench: takes no script, but got {torchrun.training_script!r}; autoddp bench --help")
    says = settle(torchrun, given_to_torchrun([*rest, "--module", MODULE]), os.environ).says
    if torchrun.no_python or torchrun.run_path:
        raise UsageError("bench: --no-python and --run-path are for scripts, and bench has its own: leave them out")
    _require_two(torchrun)
    require_job_options(torchrun)
    settings = Settings(own.budget, own.max_size, own.factor, own.backend or "")
    output = Path(own.output) if own.output else usual_folders().output
    return BenchRequest(torchrun, settings, own.json, own.svg, output, says)


def run_bench(request: BenchRequest) -> BenchResult:
    """Measure: takes the budget and some seconds of start-up. UsageError, or JobFailed when a rank ended early."""
    with _scratch() as scratch:
        place = scratch / "result.json"
        request.torchrun.training_script_args = [str(place), json.dumps(asdict(request.settings))]
        agreement, network = None, Network()
        if node_range(request.torchrun)[1] > 1:
            require_rendezvous(request.torchrun)
            require_master(request.torchrun)
            reads = f"bench {request.settings}"
            with signals_end_tuning(ending_signals(request.torchrun), "nothing is measured"):
                agreement = agree(request.torchrun, reads, reads)
            network = agreement.network
        with awaiting("the end of the measurement"):
            failure = run_own_job(request.torchrun, "bench", network.variables)
        del agreement  # it keeps the endpoint's store open until the job uses the endpoint itself
        if failure or not place.exists():
            raise JobFailed(f"bench: {failure or 'no rank of this node left a result'}; what it said is above")
        plain: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    if "error" in plain:
        raise UsageError(f"bench: {plain['error']}")
    return BenchResult.from_plain(plain)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary folder that is removed when this process ends, also when it is killed."""
    temporary = temporary_folder()
    keeper = Keeper()  # before any thread is started: it forks
    folder = Path(os.path.realpath(temporary)) / f"{PREFIX}bench-{secrets.token_hex(4)}"
    try:
        keeper.removes([str(folder)])
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        keeper.close()


def own_parser() -> argparse.ArgumentParser:
    """The options that are not torchrun's."""
    parser = argparse.ArgumentParser(
        prog="autoddp bench",
        usage="autoddp bench [torchrun's options] [options]",
        description="Time all-reduces over message sizes, within nodes and between them, and fit a model to them. "
        "Started like any job: on several hosts give the same command on each.",
        epilog="Every option of torchrun works too, such as --nnodes, --nproc-per-node and --rdzv-endpoint.",
        allow_abbrev=False,
    )
    parser.error = _refuse  # type: ignore[method-assign]
    # argparse's own method ignores that the help cannot be written.
    parser.print_help = lambda *_: show_exactly(parser.format_help())  # type: ignore[method-assign]
    add: Callable[..., Any] = parser.add_argument
    rule = "a duration above 0, e.g. --budget 20s"
    budget = _checked("--budget", rule, seconds, lambda value: value > 0)
    add("--budget", type=budget, default=Settings.budget, metavar="TIME", help="time for measuring (20s)")
    size = _checked("--max-size", "a size of 1K or more, e.g. --max-size 64M", byte_count, sizes)
    add("--max-size", type=size, default=Settings.largest, metavar="SIZE", help="largest message per rank (1G)")
    rule = "a whole number of 2 or more, e.g. --factor 4"
    factor = _checked("--factor", rule, int, lambda value: sizes(2**30, value))
    add("--factor", type=factor, default=2, metavar="N", help="from one size to the next (2)")
    add("--backend", choices=("gloo", "nccl"), help="nccl where every rank has a GPU, else gloo on the CPU")
    add("--json", action="store_true", help="print one JSON document instead of tables")
    add("--svg", type=Path, metavar="FILE", help="also draw bandwidth over size into this file")
    named = _checked("--output", "a folder, e.g. --output .autoddp", str, bool)  # Path("") is the current folder
    add("--output", type=named, metavar="DIR", help="keeps the result in DIR/bench (.autoddp/)")
    return parser


def _checked(name: str, rule: str, convert: Callable[[str], T], is_right: Callable[[T], object]) -> Callable[[str], T]:
    """A converter for argparse; `is_right` returns something false, or raises ValueError, for a wrong value."""

    def converted(text: str) -> T:
        with contextlib.suppress(ValueError):
            value = convert(text)
            if is_right(value):
                return value
        raise UsageError(f"bench: {name} {text!r}: must be {rule}")

    return converted


def _refuse(message: str) -> NoReturn:
    _, _, words = message.partition("unrecognized arguments: ")
    if words:
        unknown = words.split()[0]
        meant = meant_by(unknown, option_names(torchrun_parser(), own_parser()))
        raise UsageError(f"bench: unknown option {unknown}{meant}; autoddp bench --help")
    raise UsageError(f"bench: {message.replace('argument ', '', 1)}; autoddp bench --help")


def _require_two(torchrun: argparse.Namespace) -> None:
    """UsageError for a world of one, which has no link: no result would look like a result."""
    try:
        _, most, ranks = nodes_and_ranks(torchrun)
    except UsageError as error:
        raise UsageError(f"bench: {error}") from None
    if most * ranks < 2:
        raise UsageError("bench: with one rank there is nothing to measure; start two ranks: --nproc-per-node 2")
