"""The parsers: autoddp's and torchrun's own, what they say of a word that they refuse, and the help of both."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Collection, Container
from typing import NoReturn

from autoddp.commandline.options import DECLARED, OF_A_DIAGNOSIS, converted, rule, takes_value
from autoddp.errors import UsageError, did_you_mean
from autoddp.log import show_exactly
from autoddp.torchrun.options import torchrun_parser

_OTHER_MEANING = {"budget", "diagnose_budget"}
"""Options in `OF_A_DIAGNOSIS` that have another default there: its own help says which."""

_USES = """\
  autoddp train.py --trials 20   tune here, write a recipe, launch with it
  autoddp train.py               from then on: launch with that recipe at once
  autoddp --trials 0 train.py    only what torchrun does

Runs a DistributedDataParallel script as torchrun does, with all its options,
but first finds the settings that make it fastest here: it measures them on the
running, unmodified script.

commands, each with a --help of its own:
  diagnose    why a job is slow, by experiments on the running script
  probe       what this machine is made of, and what to expect of it
  bench       how fast gradients travel here
  predict     how fast a tuned job would be elsewhere
  recipe      show, check and compare recipes; their settings as code
  job         the file that submits a job to Slurm or Kubeflow
  report      write the report of a run anew, or compare two runs
  wrap        for a command that starts torchrun itself (accelerate launch)
  completion  what your shell needs to complete these words"""
_USUAL = ("trials", "recipe", "allow", "accumulate_up_to", "budget", "tune_only", "isolation", "verbose", "dry_run")
_USUAL_OF_TORCHRUN = ("nnodes", "nproc_per_node")
"""What `--help` lists; `--help-all` lists all."""
_ALL = "All options, torchrun's too: autoddp --help-all; the version: autoddp --version"


def own_parser() -> argparse.ArgumentParser:
    """autoddp's own options, and nothing of torchrun's. What is not given is no attribute of its result."""
    parser = argparse.ArgumentParser(
        prog="autoddp", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.error = _refuse  # type: ignore[method-assign]
    group = parser.add_argument_group("autoddp")
    for option, declared in DECLARED.items():
        more = {name: value for name, value in declared.items() if name != "example"}
        if takes_value(option):
            more["type"] = functools.partial(converted, option)
        group.add_argument(option, **more)
    return parser


def strict_torchrun_parser() -> argparse.ArgumentParser:
    """torchrun's own parser, which refuses and helps as autoddp does."""
    torchrun = torchrun_parser()
    torchrun.error = _refuse  # type: ignore[method-assign]
    # argparse's own method ignores that the help cannot be written.
    torchrun.print_help = lambda *_: show_exactly(help_text())  # type: ignore[method-assign]
    return torchrun


def option_names(*parsers: argparse.ArgumentParser) -> list[str]:
    """Every spelling of every option."""
    return [option for parser in parsers for option in parser._option_string_actions]


def help_text(whole: bool = False, of_diagnose: bool = False) -> str:
    """Uses, commands and the usual options; or, where it is to be `whole`, all of autoddp's and torchrun's options.

    `of_diagnose`: no uses, and of autoddp's options those that have the same meaning for `autoddp diagnose`.
    """
    return _parser_of(whole, of_diagnose).format_help()


def all_options() -> argparse.ArgumentParser:
    """Make a parser with all options of autoddp and torchrun and no script. It lists them, and parses nothing."""
    return _parser_of(whole=True, of_diagnose=False)


def _parser_of(whole: bool, of_diagnose: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autoddp",
        usage="autoddp [options of autoddp and torchrun] train.py [its arguments]",
        description=None if of_diagnose else _USES,
        epilog=None if whole or of_diagnose else _ALL,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own: Container[str] = {one.dest for one in own_parser()._actions}
    torchruns: Container[str] = {one.dest for one in torchrun_parser()._actions}
    if of_diagnose:
        own = OF_A_DIAGNOSIS - _OTHER_MEANING
    elif not whole:
        own, torchruns = _USUAL, _USUAL_OF_TORCHRUN
    after = "; --trials N and --recipe FILE.toml also after it" if whole and not of_diagnose else ""
    parts = (
        (f"autoddp's options (before the script{after})", own_parser(), own),
        ("torchrun's options (before the script)", torchrun_parser(), torchruns),
    )
    for title, part, listed in parts:
        group = parser.add_argument_group(title)
        for action in part._actions:
            if action.option_strings and action.dest in listed:
                group._add_action(action)
    return parser


_OF_OTHER_LAUNCHERS = {
    "--nproc-per-node": "g gpus gpus-per-node n ngpus np nproc ntasks-per-node num-gpus num-processes num-workers",
    "--nnodes": "N nodes num-machines num-nodes",
    "--node-rank": "machine-rank",
    "--master-addr": "main-process-ip master",
    "--master-port": "main-process-port port",
}
"""Our option → what mpirun, accelerate, deepspeed, srun and Lightning call it."""


def meant_by(unknown: str, known: Collection[str]) -> str:
    """` (did you mean '--nproc-per-node'?)`: what another launcher calls so, else the nearest option; "" if none."""
    named = unknown.partition("=")[0].lstrip("-").replace("_", "-").rstrip("0123456789")
    ours = next((ours for ours, others in _OF_OTHER_LAUNCHERS.items() if named in others.split()), "")
    return f" (did you mean {ours!r}?)" if ours else did_you_mean(unknown, known)


class NoScript(UsageError):
    """No word is the script's name."""


def _refuse(message: str) -> NoReturn:
    known = option_names(torchrun_parser(), own_parser())
    prefix, _, words = message.partition("unrecognized arguments: ")
    if words and not prefix:
        unknown = next((word for word in words.split() if word.startswith("-")), words)
        if unknown.partition("=")[0] in ("--use-env", "--use_env"):
            raise UsageError(
                f"{unknown}: an option of torch.distributed.launch. Under autoddp, as under torchrun, each process "
                "always finds its local rank in the environment variable LOCAL_RANK: leave the option out"
            )
        raise UsageError(f"unknown option {unknown}{meant_by(unknown, known)}; autoddp --help-all lists all")
    if "training_script" in message:
        raise NoScript("no script given: autoddp [options] train.py [its arguments]; autoddp --help-all lists all")
    if message.startswith("ambiguous option: "):  # argparse looks at every word, also at those behind the script
        word, _, several = message.removeprefix("ambiguous option: ").partition(" could match ")
        raise UsageError(
            f"{word} may stand for several options ({several}): write it out; if it is the script's, write -- before "
            "the script: autoddp [options] -- train.py [its arguments]"
        )
    option, _, problem = message.removeprefix("argument ").partition(": ")
    if option in DECLARED and problem == "expected one argument":  # the value looks like an option, as in --budget -5m
        raise UsageError(f"{option}: needs a value: {rule(option)}")
    if problem.startswith("ignored explicit argument "):
        value = problem.removeprefix("ignored explicit argument ")
        raise UsageError(f"{option}: takes no value, and got {value}: write the option alone, or leave it out")
    raise UsageError(f"{option}: {problem}" if problem else message)
