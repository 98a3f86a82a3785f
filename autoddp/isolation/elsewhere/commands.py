"""Judges the commands that the script runs, given as a list of words or as a line for the shell."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoddp.isolation.elsewhere.patch import words as word_set
from autoddp.isolation.elsewhere.tools import BY_NAME, MODULES
from autoddp.isolation.pipes import OTHERS

_SHELLS = word_set("sh bash dash zsh ksh ash fish busybox")
_WRAPPERS = word_set(
    "env sudo doas nohup time nice ionice timeout exec command builtin eval stdbuf setsid xargs parallel watch taskset "
    "numactl unbuffer script flock chrt strace ltrace find uv uvx pipx poetry pdm conda mamba micromamba pixi "
    "then do else elif if while until ! { coproc chroot unshare nsenter su runuser catchsegv proxychains"
)
"""Programs and words of the shell that run the command that follows them. Their options are not parsed: the command
begins at the first word that is a known program."""
_SEPARATORS = frozenset("();<>|&\n")
_DEPTH = 6  # of shells in shells
_SCRIPT_SIZE = 64 * 1024  # bytes of a shell script that are looked at


@dataclass(frozen=True)
class Around:
    """What surrounds a command."""

    folder: str = ""
    """The folder in which it runs; "" for this process's own."""
    are_others: Callable[[str], bool] = lambda path: False
    """Whether a path is a named pipe whose other end is outside the attempt."""

    def path(self, word: str) -> str:
        """The path that a word means in this folder."""
        return os.path.join(self.folder, word)


HERE = Around()
"""This process's own folder, in which no pipe is looked for."""


def judge_shell(text: str, around: Around = HERE) -> str:
    """ "" if this shell line changes nothing elsewhere, else what it changes."""
    return next(_judge_text(text, around, 0), "")


def judge_words(words: Sequence[str], around: Around = HERE) -> str:
    """As `judge_shell`, for a command that is split into words already."""
    return next(_judge(list(words), around, 0), "")


def _judge_text(text: str, around: Around, depth: int) -> Iterator[str]:
    if depth > _DEPTH:
        return
    for words in split(text):
        yield from _judge(words, around, depth + 1)


def split(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell line, and those in `$( )` and backticks."""
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("`", "$("), posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    try:
        tokens = list(lexer)
    except ValueError:  # a quote without an end: too many words are better than none
        tokens = re.split(r"\s+", text)
    words: list[str] = []
    for token in tokens:
        if token and _SEPARATORS.issuperset(token):
            if words:
                yield words
            words = []
            continue
        words.append(token)
        if "$(" in token:
            yield from split(token.partition("$(")[2].replace(")", "\n"))
    if words:
        yield words


def _judge(words: list[str], around: Around, depth: int) -> Iterator[str]:
    for word in words:  # the first one may be what follows a `>` of the shell
        named = next(
            (each for each in (word, word.partition("=")[2]) if each and around.are_others(around.path(each))), ""
        )
        if named:
            yield f"{os.path.basename(words[0])} opens {named}, {OTHERS}"
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if not words or depth > _DEPTH:
        return
    name, args = os.path.basename(words[0]), words[1:]
    tool = BY_NAME.get(name)
    if tool is not None:
        if tool.changes(args):
            yield f"{name} changes something outside this run ({_shown(name, args)})"
    elif name in _SHELLS:
        yield from _judge_shell_program(args, around, depth)
    elif re.fullmatch(r"python[\d.]*|pypy[\d.]*", name):
        yield from _judge_python(args, around, depth)
    elif name not in _WRAPPERS:
        yield from _judge_script(words[0], around, depth)
    if name in _WRAPPERS:  # also after the checks above: poetry publishes, and it runs programs
        yield from _judge_wrapped(args, around, depth)


def _judge_wrapped(args: list[str], around: Around, depth: int) -> Iterator[str]:
    for place, word in enumerate(args):
        name = os.path.basename(word)
        if name in BY_NAME or name in _SHELLS or re.fullmatch(r"python[\d.]*", name):
            yield from _judge(args[place:], around, depth + 1)
            return
        if " " in word:  # `eval "git push"`, `su -c "…"`
            yield from _judge_text(word, around, depth + 1)
    if args:
        yield from _judge_script(args[-1] if args[-1].endswith("sh") else args[0], around, depth)


def _judge_shell_program(args: list[str], around: Around, depth: int) -> Iterator[str]:
    for place, word in enumerate(args):
        if re.fullmatch(r"-[a-zA-Z]*c", word):
            if place + 1 < len(args):
                yield from _judge_text(args[place + 1], around, depth)
            return
        if not word.startswith(("-", "+")):
            yield from _judge_script(word, around, depth, shell=True)
            return


def _judge_python(args: list[str], around: Around, depth: int) -> Iterator[str]:
    for place, word in enumerate(args):
        if word == "-m":
            module, rest = args[place + 1 : place + 2], args[place + 2 :]
            if module and module[0] in MODULES:
                yield from _judge([MODULES[module[0]], *rest], around, depth + 1)
            return
        if word == "-c":
            return  # Python code: that process has checks of its own
        if not word.startswith("-"):
            # A console script may be called through its Python: `python /venv/bin/aws s3 cp …`.
            if os.path.basename(word) in BY_NAME:
                yield from _judge(args[place:], around, depth + 1)
            return


def _judge_script(path: str, around: Around, depth: int, shell: bool = False) -> Iterator[str]:
    """Judge a shell script's lines: the script is no Python process, so nothing else checks what it runs."""
    if not shell and os.sep not in path:
        return
    try:
        with open(around.path(path), "rb") as script:
            text = script.read(_SCRIPT_SIZE).decode(errors="replace")
    except (OSError, ValueError):
        return
    interpreter = text.partition("\n")[0] if text.startswith("#!") else ""
    named = {os.path.basename(word) for word in interpreter[2:].split()}
    if named & _SHELLS or (shell and not interpreter and "\0" not in text):
        yield from _judge_text(text, around, depth + 1)


def _shown(name: str, args: Sequence[str]) -> str:
    """The first words up to an option: options may be followed by a password."""
    words = [name]
    for arg in args:
        if arg.startswith("-") or len(words) == 4:
            break
        words.append(arg.partition("?")[0])
    return " ".join(words)[:120]
