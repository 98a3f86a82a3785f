"""`autoddp job KIND [options] train.py [arguments]`: the file with which the job is submitted to a cluster."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from autoddp.cli.parser import Parser
from autoddp.cluster.job_files import FILES, JobRequest
from autoddp.commandline.options import Options
from autoddp.commandline.words import parse
from autoddp.errors import UsageError
from autoddp.log import printable, show_exactly
from autoddp.torchrun.options import torchrun_parser

_NAME = re.compile("[a-z]([a-z0-9-]{0,61}[a-z0-9])?")  # Kubernetes' rule, which suits Slurm too
_TIME = re.compile("([0-9]+-)?[0-9]+(:[0-9]+){0,2}")
_OF_THE_FILE = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "standalone")
"""Fields of torchrun's options that the cluster sets."""
_OF_FILES = ("--nodes", "--gpus", "--name", "--time", "--image")
"""Options of this command, all of which have a value."""
_HELP = ("-h", "--help")
_EXAMPLE = """\
  autoddp job slurm --nodes 4 --gpus 8 train.py --epochs 3 > job.sh
  sbatch job.sh
  autoddp job kubeflow --gpus 8 --image me/train train.py | kubectl apply -f -

Prints the file and nothing else. The options below stand right after the kind
of file. All other options, and the arguments after the script's name, are
those of `autoddp train.py`."""


def run(arguments: list[str]) -> int:
    """The exit code of `autoddp job` with these arguments; UsageError for words that make no file.

    run(["slurm", "--nodes", "4", "train.py", "--epochs", "3"])
    """
    given, words = _divided(arguments)
    if given.kind != "slurm" and not given.image:
        raise UsageError(f"job: {given.kind} runs containers: name an image that has autoddp in it by --image")
    if given.kind != "slurm" and given.time:
        raise UsageError(f"job: --time {given.time}: only Slurm's script has a limit of time; leave it out")
    if given.kind == "slurm" and given.image:
        raise UsageError(f"job: --image {printable(given.image)}: Slurm's script starts no container; leave it out")
    options = _parsed(words, given.kind)
    _require_free_place(options)
    if given.kind != "slurm":
        _require_text(words)
    name = given.name or _name(options.script)
    request = JobRequest(
        name=name, words=tuple(words), nodes=given.nodes, gpus=given.gpus, time=given.time, image=given.image
    )
    show_exactly(f"{FILES[given.kind](request)}\n")
    return 0


def _divided(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of the file, which stand first, and the words of `autoddp` from the first other one on."""
    end = 1
    while end < len(arguments) and arguments[end].partition("=")[0] in (*_OF_FILES, *_HELP):
        end += 1 if "=" in arguments[end] or arguments[end] in _HELP else 2
    return _parser().parse_args(arguments[:end]), arguments[end:]


def _parsed(words: Sequence[str], kind: str) -> Options:
    """What `autoddp` makes of these words; UsageError also for an option of the file that stands among them."""
    try:
        return parse(words, asks_cluster=False)
    except UsageError as error:
        unknown = re.match(r"unknown option (--[\w-]+)", str(error))
        if unknown is None or unknown[1] not in _OF_FILES:
            raise
        # What its text suggests, such as --nproc-per-node for --gpus, would make a file that asks for no GPU.
        raise UsageError(f"job: {unknown[1]}: an option of the file: write it right behind {kind}") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="autoddp job",
        usage="autoddp job slurm|kubeflow|pytorchjob [options] train.py [its arguments]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_EXAMPLE,
    )
    parser.add_argument("kind", choices=list(FILES), help="what the file is for")
    parser.add_argument("--nodes", type=_at_least_one, default=2, metavar="N", help="number of nodes (2)")
    parser.add_argument("--gpus", type=_at_least_one, metavar="N", help="GPUs of each node (the file asks for none)")
    parser.add_argument("--name", type=_matching(_NAME), help="the job's name (the script's)")
    parser.add_argument("--time", type=_matching(_TIME), metavar="TIME", help="Slurm's limit of time, e.g. 2:00:00")
    parser.add_argument("--image", default="", help="image of the container, for Kubeflow")
    return parser


def _at_least_one(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of 1 or more")
    return int(text)


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    rules = {_NAME: "lower-case letters, digits and -, beginning with a letter", _TIME: "a time such as 2:00:00"}

    def matched(text: str) -> str:
        if not pattern.fullmatch(text):
            raise argparse.ArgumentTypeError(f"{text!r}: must be {rules[pattern]}")
        return text

    return matched


def _require_free_place(options: Options) -> None:
    """UsageError for options that say what the file says."""
    usual = torchrun_parser()
    for field in _OF_THE_FILE:
        if getattr(options.torchrun, field) != usual.get_default(field):
            raise UsageError(
                f"job: --{field.replace('_', '-')}: on a cluster each node is told its place; leave it out, and say "
                "the number of nodes by --nodes behind the kind of file"
            )


def _require_text(words: Sequence[str]) -> None:
    """UsageError for a word that a manifest cannot hold, such as a file's name in another encoding than UTF-8."""
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UsageError(f"job: {printable(word)}: not UTF-8, and a manifest holds nothing else: rename it")


def _name(script: str) -> str:
    """Make a job's name of the script's: small letters, digits and hyphens."""
    name = re.sub("[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:50].strip("-")
    return name if _NAME.fullmatch(name) else f"job-{name}".strip("-")
