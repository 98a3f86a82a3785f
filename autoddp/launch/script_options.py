"""Whose word is it? A command line divided between autoddp, torchrun and the script.

Before the script's name stand the options of autoddp and of torchrun, in any order. After it everything is the
script's, except `--trials N` and `--recipe FILE.toml`, so that `autoddp train.py --trials 20` works. These two are the
script's too
    - where its own source has an option of that name, or cannot be read,
    - after a `--`, before or after the script's name,
    - where `--trials 0` stands before the script's name: then autoddp is torchrun.

Of its words the script gets what torchrun gives it of them.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autoddp.errors import UsageError
from autoddp.launch.script import ScriptSource

TAKEN_AFTER_THE_SCRIPT = {"--trials": re.compile("[0-9]+"), "--recipe": re.compile(r"[^-].*\.toml|\.toml", re.DOTALL)}
"""Options of autoddp that may stand after the script's name, and the values with which they are autoddp's."""


@dataclass
class Division:
    """One command line, divided."""

    own: list[str] = field(default_factory=list)
    """Words for autoddp's own parser."""
    torchrun: list[str] = field(default_factory=list)
    """Words for torchrun's parser: its options, the script and the script's words."""
    says: list[str] = field(default_factory=list)
    """A line for the user about each word that somebody else might have been meant to get."""


def divide(
    argv: Sequence[str],
    options: Mapping[str, str],
    understand: Callable[[list[str]], argparse.Namespace],
    is_torchrun: Callable[[list[str]], bool],
    look_alikes: Collection[str],
) -> Division:
    """Divide a command line. UsageError where an option of autoddp lacks its value.

    `options`: autoddp's own, and what the value of each must be; "" for one without a value. `understand`: torchrun's
    parser. `is_torchrun`: whether autoddp is torchrun with these words of its own. `look_alikes`: options of autoddp
    and torchrun, which get a line where they stand among the script's words.
    """
    at, torchrun = _find_script(argv, options, understand)
    own, rest, _ = _without_own(argv[:at], options)
    script, after = argv[at], list(argv[at + 1 :])
    division = Division(own, [*rest, script])
    end = 0 if "--" in rest else _position(after, "--")
    source = ScriptSource(torchrun)
    takes = {} if is_torchrun(own) else TAKEN_AFTER_THE_SCRIPT
    passed: list[str] = []
    name = script if torchrun.module else Path(script).name
    position = 0
    while position < end:
        word = after[position]
        option, has_value, value = word.partition("=")
        following = [value] if has_value else after[position + 1 : min(position + 2, end)]
        words = after[position : position + (1 if has_value else 1 + len(following))]
        fits = option in takes and following and takes[option].fullmatch(following[0])
        if fits and not source.may_have(option):
            division.own += words
            division.says.append(
                f"{shlex.join(words)} is taken as autoddp's own; for {name} write -- before the script"
            )
            position += len(words)
            continue
        if fits:
            why = f"whose source has {option}" if source.readable else "whose options are not known"
            division.says.append(
                f"{shlex.join(words)} is passed to {name}, {why}; for autoddp write it before the script"
            )
        elif option in look_alikes:
            passed.append(option)
        division.torchrun.append(word)
        position += 1
    division.torchrun += after[end:]
    division.says += _hints(name, passed, after, source)
    return division


def _hints(name: str, passed: list[str], after: list[str], source: ScriptSource) -> list[str]:
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


def _find_script(
    argv: Sequence[str], options: Mapping[str, str], understand: Callable[[list[str]], argparse.Namespace]
) -> tuple[int, argparse.Namespace]:
    """Where in `argv` the script's name stands, and what torchrun's parser makes of the words that are not ours."""
    _, rest, places = _without_own(argv, options, lenient=True)
    torchrun = understand(rest)
    at = len(rest) - len(torchrun.training_script_args) - 1
    if rest[at] == "--":  # argparse swallows one that follows the script at once
        at -= 1
    return places[at], torchrun


def _without_own(
    argv: Sequence[str], options: Mapping[str, str], lenient: bool = False
) -> tuple[list[str], list[str], list[int]]:
    """Our words up to a `--`, all others, and where in `argv` each of those stood."""
    own: list[str] = []
    rest: list[str] = []
    places: list[int] = []
    position, end = 0, _position(argv, "--")
    while position < len(argv):
        word = argv[position]
        option, has_value, _ = word.partition("=")
        if position >= end or option not in options:
            rest.append(word)
            places.append(position)
            position += 1
            continue
        found = list(argv[position : position + (2 if options[option] and not has_value else 1)])
        if options[option] and not has_value and not _has_value(found):
            if not lenient:
                raise UsageError(f"{option}: needs a value: {options[option]}")
            found = found[:1]
        own += found
        position += len(found)
    return own, rest, places


def _has_value(found: list[str]) -> bool:
    return len(found) == 2 and not found[1].startswith("--")


def _position(words: Sequence[str], word: str) -> int:
    """Where `word` stands first; the number of words where it does not."""
    return list(words).index(word) if word in words else len(words)
