"""The words of a command line: each one is autoddp's, torchrun's or the script's, and all together are one `Options`.

Before the script's name stand the options of autoddp and of torchrun, in any order. After it
everything is the script's, except `--trials N` and `--recipe FILE.toml`, so that `autoddp train.py --trials 20` works.
These two are passed to the script too
    - where its own source has an option of that name, or cannot be read,
    - after a `--`, before or after the script's name,
    - where `--trials 0` stands before the script's name: then autoddp is torchrun.

The script gets all its other words as it would get them from torchrun.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoddp.commandline.options import DECLARED, Options, rule, spelled, takes_value
from autoddp.commandline.parsers import NoScript, option_names, own_parser, strict_torchrun_parser
from autoddp.commandline.place import settle
from autoddp.commandline.script import ScriptSource, is_standard_input
from autoddp.errors import UsageError, did_you_mean
from autoddp.knobs import Rung
from autoddp.runs.usual_folders import usual_folders
from autoddp.torchrun.options import torchrun_parser, variables_of_torchrun

TAKEN_AFTER_THE_SCRIPT = {"--trials": re.compile("[0-9]+"), "--recipe": re.compile(r"[^-].*\.toml|\.toml", re.DOTALL)}
"""Options of autoddp that may stand after the script's name, and the values with which they are autoddp's."""


def parse(argv: Sequence[str], asks_cluster: bool = True) -> Options:
    """Understand a command line; UsageError, one line, for one that cannot be.

    With `asks_cluster`, what the user does not say of this node's place is what a cluster tells.
    """
    own, torchrun = own_parser(), strict_torchrun_parser()
    ours, theirs, says = _divide(argv, own, torchrun)
    options = _options(ours, *_torchruns(theirs, torchrun), tuple(says))
    asks = asks_cluster and options.trials != 0
    return _with_place(options, given_to_torchrun(theirs)) if asks else options


def _with_place(options: Options, given: dict[str, str]) -> Options:
    """The options with what a cluster tells of this node's place, where the user has not said it. UsageError."""
    settled = settle(options.torchrun, given, os.environ)
    says = (*options.says, settled.says) if settled.says else options.says
    return replace(options, ranks_given=options.ranks_given or settled.ranks_told, says=says)


def given_to_torchrun(words: Sequence[str]) -> dict[str, str]:
    """Field of torchrun's options → the option among `words`, or the variable, that sets it."""
    parser = strict_torchrun_parser()
    named = [action for action in parser._actions if action.option_strings]
    variables = {action.dest: f"PET_{action.dest.upper()}" for action in named}
    for action in named:
        action.default = argparse.SUPPRESS
    of_words = vars(parser.parse_args(words))
    set_here = {field: variable for field, variable in variables.items() if variable in os.environ}
    return set_here | {field: spelled(field) for field in of_words if field in variables}


def given_words(torchrun: argparse.Namespace, but: Collection[str]) -> list[str]:
    """The options of torchrun that are not as they are where nobody gives them, as words; without the fields `but`.

    What a variable PET_* gives stays in the environment, and is no word.
    """
    words = []
    for action in torchrun_parser()._actions:
        value = getattr(torchrun, action.dest, action.default)
        if not action.option_strings or action.dest in but or str(value) == str(action.default):
            continue
        option = next(one for one in action.option_strings if one.startswith("--"))
        if isinstance(value, list):  # a comma in it is written twice
            value = ",".join(one.replace(",", ",,") for one in value)
        words.append(option if action.nargs == 0 else f"{option}={value}")
    return words


def parse_with_switch(argv: Sequence[str], switch: str) -> tuple[Options, bool]:
    """What `parse` returns, and whether `switch`, which no training job has, stands before the script."""
    others = [(place, word) for place, word in enumerate(argv) if word != switch]
    at, _ = _find_script([word for _, word in others], strict_torchrun_parser())
    script_at = others[at][0]
    rest = [word for place, word in enumerate(argv) if word != switch or place > script_at]
    return parse(rest), switch in argv[:script_at]


def parse_apart(ours: Sequence[str], torchrun: Sequence[str] | argparse.Namespace) -> Options:
    """Understand torchrun's words, or what its parser has made of them, with autoddp's own options beside them.

    No word of `torchrun` is autoddp's. UsageError as for `parse`.
    """
    if not isinstance(torchrun, argparse.Namespace):
        return _options(ours, *_torchruns(torchrun, strict_torchrun_parser()))
    understood = argparse.Namespace(**vars(torchrun))
    for action in torchrun_parser()._actions:  # a program that fills in the namespace may leave its numbers as text
        value = getattr(understood, action.dest, None)
        if action.type is int and isinstance(value, str):
            setattr(understood, action.dest, int(value))
    if getattr(understood, "run_path", False):
        understood.no_python = False  # as in `_torchruns`
    return _options(ours, understood, True)


def leading_own(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of autoddp at the beginning, and the words from the first other one on; UsageError for a bad one."""
    end, places = len(argv), _without_own(argv, lenient=True)[2]
    ours, rest = list(argv[: min(places, default=end)]), list(argv[min(places, default=end) :])
    if rest and rest[0] != "--" and rest[0].startswith("-"):
        meant = did_you_mean(rest[0], option_names(own_parser()))
        torchruns = "torchrun's stand in the command, see autoddp wrap --help"
        raise UsageError(f"{rest[0]}: no option of autoddp{meant}; {torchruns}")
    _options(_without_own(ours)[0], argparse.Namespace(), True)
    return ours, rest[1:] if rest[:1] == ["--"] else rest


def _torchruns(words: Sequence[str], torchrun: argparse.ArgumentParser) -> tuple[argparse.Namespace, bool]:
    """What torchrun's parser makes of these words, and whether they, or a variable, give a number of ranks."""
    usual_ranks = torchrun.get_default("nproc_per_node")
    if "PET_NPROC_PER_NODE" not in os.environ:
        torchrun.set_defaults(nproc_per_node=None)
    understood = torchrun.parse_args(words)
    understood.no_python = understood.no_python and not understood.run_path  # which takes precedence
    ranks_given = understood.nproc_per_node is not None
    if not ranks_given:
        understood.nproc_per_node = usual_ranks
    return understood, ranks_given


def _options(
    ours: Sequence[str], torchrun: argparse.Namespace, ranks_given: bool, says: tuple[str, ...] = ()
) -> Options:
    words, variables = of_words(ours), _from_environment()
    given = {**variables, **words}
    folders = usual_folders()
    rest = {"torchrun": torchrun, "ranks_given": ranks_given, "says": says, "folders": folders}
    is_known = "training_script" in torchrun  # `autoddp wrap` reads its options before the job that it starts
    rest["is_standard_input"] = is_known and is_standard_input(torchrun)
    named = {name: f"AUTODDP_{name.upper()}" for name in variables}
    return Options(**{"output": folders.output, **given, **rest}, given=frozenset(words), variables=named)


def of_words(words: Sequence[str]) -> dict[str, Any]:
    """Field of the options → value, for words that are all autoddp's own. UsageError for a bad one."""
    found = vars(own_parser().parse_args(words))
    return found | ({"allow": Rung(found["allow"])} if "allow" in found else {})


RESERVED = ("AUTODDP_LOG", "AUTODDP_TUNING", "AUTODDP_WRAP")
"""Variables of autoddp that are no options."""
_INTERNAL = re.compile("AUTODDP_(WORKER_.*|RECORDS_CALLS|USERS_PYTHONPATH|NAMES_ERRORS_FOR|CLOCK_AHEAD|NO_LANDLOCK)")
_OF_A_SERVICE = "_SERVICE_HOST"
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def _from_environment() -> dict[str, Any]:
    """The options that variables such as AUTODDP_ALLOW=exact set; the command line overrules them. UsageError."""
    options = {f"AUTODDP_{option[2:].replace('-', '_').upper()}": option for option in DECLARED}
    # Kubernetes sets AUTODDP_SERVICE_HOST, AUTODDP_PORT and more in each pod where there is a Service of that name.
    services = [name.removesuffix(_OF_A_SERVICE) for name in os.environ if name.endswith(_OF_A_SERVICE)]
    of_services = tuple(f"{service}{rest}" for service in services for rest in ("_SERVICE_", "_PORT"))
    words = []
    for name, value in os.environ.items():
        if not name.startswith("AUTODDP_") or name in RESERVED or _INTERNAL.fullmatch(name):
            continue
        if name not in options and name.startswith(of_services):
            continue
        if name not in options:
            if (theirs := f"PET_{name.removeprefix('AUTODDP_')}") in variables_of_torchrun():
                raise UsageError(f"{name}: no variable of autoddp, but an option of torchrun: set {theirs} instead")
            raise UsageError(f"{name}: no variable of autoddp{did_you_mean(name, options)}; unset it")
        if takes_value(options[name]):
            words.append(f"{options[name]}={value}")
        elif value.lower() in _ON:
            words.append(options[name])
        elif value.lower() not in _OFF:
            raise UsageError(f"{name}={value}: must be 1 or 0")
    try:
        return of_words(words)
    except UsageError as error:
        raise UsageError(f"{error} (from the environment: see `env | grep AUTODDP_`)") from None


# Dividing the words between autoddp, torchrun and the script


def _divide(
    argv: Sequence[str], own: argparse.ArgumentParser, torchrun: argparse.ArgumentParser
) -> tuple[list[str], list[str], list[str]]:
    """The words for autoddp's own parser, those for torchrun's, and a line for the user about each doubtful one.

    torchrun's are its options, the script and the script's words. UsageError where an option of autoddp has no value.
    """
    script_at, understood = _find_script(argv, torchrun)
    for option, _, value in (word.partition("=") for word in argv[:script_at]):
        if option.startswith("--") and value == "--":  # argparse drops it, and makes an empty list of the rest
            raise UsageError(f"{option}: no option takes the value --: give another one, or leave it out")
    ours, rest, _ = _without_own(argv[:script_at])
    script, after = argv[script_at], list(argv[script_at + 1 :])
    theirs, says = [*rest, script], []
    end = 0 if "--" in rest else _position(after, "--")
    source = ScriptSource(understood)
    is_torchrun = vars(own.parse_args(ours)).get("trials") == 0
    takes = {} if is_torchrun else TAKEN_AFTER_THE_SCRIPT
    look_alikes = {option for option in option_names(torchrun, own) if option.startswith("--")} - {"--help"}
    passed: list[str] = []
    name = script if understood.module else Path(script).name
    position = 0
    while position < end:
        option, has_value, value = after[position].partition("=")
        following = [value] if has_value else after[position + 1 : min(position + 2, end)]
        words = after[position : position + (1 if has_value else 1 + len(following))]
        fits = option in takes and following and takes[option].fullmatch(following[0])
        if fits and not source.may_have(option):
            ours += words
            says.append(f"{shlex.join(words)} is taken by autoddp; for {name} put -- before the script")
            position += len(words)
            continue
        if fits:
            why = f"whose source has {option}" if source.readable else "whose options are not known"
            says.append(f"{shlex.join(words)} is passed to {name}, {why}; for autoddp write it before the script")
        elif option in look_alikes and not source.declares(option):
            passed.append(option)
        theirs.append(after[position])
        position += 1
    return ours, theirs + after[end:], says + _hints(name, passed, after, source)


def _hints(name: str, passed: Collection[str], after: Sequence[str], source: ScriptSource) -> list[str]:
    says = []
    if passed:
        found = list(dict.fromkeys(passed))
        are, them = ("are", "them") if len(found) > 1 else ("is", "it")
        says.append(f"{', '.join(found)} {are} passed to {name}; for autoddp write {them} before the script")
    wanted = source.wants_local_rank()
    if wanted and not any(re.match("--local[-_]rank(=|$)", word) for word in after):
        says.append(
            f"{name} has the option {wanted}, which torch.distributed.launch passed and torchrun does not: "
            "each process finds its local rank in the environment variable LOCAL_RANK"
        )
    return says


def _find_script(argv: Sequence[str], torchrun: argparse.ArgumentParser) -> tuple[int, argparse.Namespace]:
    """The position of the script's name in `argv`, and what torchrun's parser makes of its own words."""
    _, rest, places = _without_own(argv, lenient=True)
    try:
        understood = torchrun.parse_args(rest)
    except NoScript:
        of_words(_without_own(argv)[0])  # `--trials train.py`: a value is missing, and the script was taken for it
        raise
    at = len(rest) - len(understood.training_script_args) - 1
    if rest[at] == "--":  # argparse swallows one that follows the script at once
        at -= 1
    return places[at], understood


def _without_own(argv: Sequence[str], lenient: bool = False) -> tuple[list[str], list[str], list[int]]:
    """autoddp's words up to a `--`, all others, and the positions in `argv` of those others."""
    own: list[str] = []
    rest: list[str] = []
    places: list[int] = []
    position, end = 0, _position(argv, "--")
    while position < len(argv):
        word = argv[position]
        option, has_value, _ = word.partition("=")
        if position >= end or option not in DECLARED:
            rest.append(word)
            places.append(position)
            position += 1
            continue
        wants_value = takes_value(option) and not has_value
        found = list(argv[position : position + (2 if wants_value else 1)])
        if wants_value and (len(found) < 2 or found[1].startswith("--")):
            if not lenient:
                raise UsageError(f"{option}: needs a value: {rule(option)}")
            found = found[:1]
        own += found
        position += len(found)
    return own, rest, places


def _position(words: Sequence[str], word: str) -> int:
    """The position at which `word` stands first; the number of words where it does not."""
    return list(words).index(word) if word in words else len(words)
