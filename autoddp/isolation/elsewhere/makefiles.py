"""What `make` would run: while it reads the makefile, and the recipes of the targets that it is asked for.

Makefiles are read and not run. Names that only make could compute stay as they are written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

_NAMES = ("GNUmakefile", "makefile", "Makefile")
_VALUED = ("-C", "--directory", "-f", "--file", "--makefile", "-I", "-o", "-W", "-j", "-l", "-O")
_LARGEST = 256 * 1024  # bytes of a makefile that are looked at
_RULE = re.compile(r"([^\t#:=][^:=]*)::?(?!=)([^=;]*)(?:;(.*))?")
_VALUE = re.compile(r"\s*(?:export\s+|override\s+)*([\w.-]+)\s*(:{1,3}|[?+!])?=\s*(.*)")
_INCLUDE = re.compile(r"[-s]?include\s+(.*)")
_AT_ONCE = re.compile(r":+|!")  # the kinds of assignment whose value make computes when it reads them
_SHELL = re.compile(r"\$([({])shell\s+")
_REFERENCE = re.compile(r"\$[({]([\w.-]+)[)}]")


def recipes(args: Sequence[str], folder: str) -> Iterator[tuple[str, str]]:
    """The folder and the lines for the shell that `make` with these arguments would run in `folder`."""
    files: list[str] = []
    targets: list[str] = []
    values = {"MAKE": "make", "CURDIR": "."}
    words = iter(args)
    for word in words:
        option, _, value = word.partition("=")
        if word[:2] in ("-C", "-f") and len(word) > 2:
            option, value = word[:2], word[2:]
        if option in _VALUED and not value and option != "-j" and option != "-O":
            value = next(words, "")
        if option in ("-C", "--directory"):
            folder = os.path.join(folder, value)
        elif option in ("-f", "--file", "--makefile"):
            files.append(value)
        elif not word.startswith("-") and "=" in word:
            values[option] = value
        elif not word.startswith("-") and not word.isdigit():
            targets.append(word)
    files = files or [name for name in _NAMES if os.path.isfile(os.path.join(folder, name))][:1]
    text = "\n".join(_text(os.path.join(folder, name), folder) for name in files)
    rules = list(_rules(text, values))
    yield folder, "\n".join(_while_read(text, values))
    wanted = targets or [name for names, _, _ in rules[:1] for name in names[:1]]
    for lines in _reached(rules, wanted):
        yield folder, lines


def _text(path: str, folder: str, depth: int = 3) -> str:
    """A makefile with those that it includes."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_LARGEST).replace("\\\n", " ")
    except OSError:
        return ""
    found = [match[1].split() for match in map(_INCLUDE.match, text.split("\n")) if match and depth]
    more = [_text(os.path.join(folder, name), folder, depth - 1) for names in found for name in names]
    return "\n".join([text, *more])


def _rules(text: str, values: dict[str, str]) -> Iterator[tuple[list[str], list[str], str]]:
    """Targets, what they need, and the recipe of each rule."""
    given, names, needs, recipe = set(values), list[str](), list[str](), list[str]()
    for line in text.split("\n"):
        if line.startswith("\t"):
            recipe.append(line.strip().lstrip("@-+"))
            continue
        value, rule = _VALUE.match(line), _RULE.match(line)
        if value is not None and value[1] not in given:
            written = value[3].partition(" #")[0]
            values[value[1]] = f"$(shell {written})" if value[2] == "!" else written
        elif rule is not None and value is None:
            if names:
                yield names, needs, _expanded("\n".join(recipe), values)
            names, needs = _expanded(rule[1], values).split(), _expanded(rule[2], values).split()
            recipe = [rule[3].strip()] if rule[3] else []
            names = [name for name in names if not re.fullmatch(r"\.[A-Z_]+", name)]
    if names:
        yield names, needs, _expanded("\n".join(recipe), values)


def _while_read(text: str, values: dict[str, str]) -> Iterator[str]:
    """What the shell is asked for outside of recipes, except by values that are computed where they are used."""
    for line in text.split("\n"):
        value = _VALUE.match(line)
        if line.startswith(("\t", "#")) or (value is not None and not _AT_ONCE.fullmatch(value[2] or "")):
            continue
        if value is not None and value[2] == "!":
            yield _expanded(value[3], values)
            continue
        line = _in_make(line, values)
        for call in _SHELL.finditer(line):
            yield _inside(line[call.end() :], call[1])


def _inside(text: str, bracket: str) -> str:
    """The text until the bracket that ends it."""
    depth, close = 1, {"(": ")", "{": "}"}[bracket]
    for index, character in enumerate(text):
        depth += (character == bracket) - (character == close)
        if not depth:
            return text[:index]
    return text


def _expanded(text: str, values: dict[str, str]) -> str:
    """The text as the shell gets it: make's `$(shell …)` becomes the shell's own `$(…)`, which runs the same."""
    text = _in_make(text, values)
    while call := _SHELL.search(text):
        rest = text[call.end() :]
        line = _inside(rest, call[1])
        text = f"{text[: call.start()]}$({line}){rest[len(line) + 1 :]}"
    return text


def _in_make(text: str, values: dict[str, str], depth: int = 5) -> str:
    """The text with the values of make's variables. The shell's own, which make writes with two dollars, stay."""

    def value(found: re.Match[str]) -> str:
        known = values.get(found[1])
        return f"${{{found[1]}}}" if known is None or not depth else _in_make(known, values, depth - 1)

    parts = text.split("$$")
    return "$".join(_REFERENCE.sub(value, part) for part in parts)


def _reached(rules: Sequence[tuple[list[str], list[str], str]], wanted: Sequence[str]) -> Iterator[str]:
    pending, done = list(wanted), set[str]()
    while pending:
        target = pending.pop()
        if target in done or len(done) > 10_000:
            continue
        done.add(target)
        for names, needs, recipe in rules:
            if any(name == target or ("%" in name and fnmatchcase(target, name.replace("%", "*"))) for name in names):
                pending += needs
                if recipe:
                    yield recipe
