"""Which known programs a process acts for: by its words, and by those of the programs that have started it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from autoddp.isolation.elsewhere.own import is_own_process, parent_of
from autoddp.isolation.elsewhere.tools import BY_NAME, MODULES, Tool, shown
from autoddp.isolation.reporting import SHELLS

_HADOOP = "org.apache.hadoop.fs.FsShell"
"""The program that `hdfs dfs` and `hadoop fs` become."""
_BY_SSH = ("git", "rsync", "scp")
"""Programs that reach their server by ssh: their words tell what for."""
_INTERPRETER = re.compile(r"(.*python|pypy|perl|ruby|node|php|lua|tclsh)[\d.]*t?")
_MANY_IN_ONE = ("busybox", "toybox")
"""Programs whose first argument is the program's name."""
_PART_OF_GIT = re.compile("git-(.+)")
"""`git submodule` is the program `git-submodule`."""


class Known(NamedTuple):
    """A process that runs a known program."""

    name: str
    tool: Tool
    arguments: list[str]

    @property
    def changes(self) -> str:
        """What it changes outside the run; "" if it only reads."""
        if not self.tool.changes(self.arguments):
            return ""
        return f"{self.name} changes something outside this run ({shown(self.name, self.arguments)})"


def acts_for(words: list[str], starters: Iterable[list[str]]) -> list[Known]:
    """The known programs for which a program with these words acts; none where nobody knows.

    It is one of them, or a helper of one, such as `git-remote-https`. `starters` are the words of the program that has
    started it, of that one's, and so on. Of any other program that a known one starts, as `git` starts hooks, nobody
    knows what it does.
    """
    found: list[Known] = []
    before: Known | None = None
    for each in (words, *starters):
        if os.path.basename(each[0]) in SHELLS and each[1:2] == ["-c"]:
            continue  # git starts some of its parts by a shell
        known = tool_of(each)
        if known is not None and before is not None and _is_part_of(before, known):
            found[-1] = known
        elif known is not None:
            found.append(known)
        before = known
    is_helper = bool(found) and os.path.basename(words[0]).startswith(f"{found[0].name}-")
    return found if is_helper or tool_of(words) is not None else []


def _is_part_of(one: Known, starter: Known) -> bool:
    """Whether the words of the program that has started another one tell what for: git and git-lfs start each other."""
    name, starts = one.name.removesuffix("-lfs"), starter.name.removesuffix("-lfs")
    return name == starts or (name == "ssh" and starts in _BY_SSH)


def tool_of(words: list[str]) -> Known | None:
    """The known program that a process runs, by itself or by an interpreter: `perl /usr/bin/x push`.

    An interpreter has the path of its script; any other word may be an argument of a program that nobody knows: so is
    `/out/code` in `cp -r /out/code /tmp`, and in `sh -c "mkdir /out/code"`. The user's own `batch.py` is no `batch`.
    """
    if _HADOOP in words:
        return Known("hdfs", BY_NAME["hdfs"], ["dfs", *words[words.index(_HADOOP) + 1 :]])
    if os.path.basename(words[0]) in _MANY_IN_ONE:
        words = words[1:]
    is_module = False
    for place, word in enumerate(words):
        name = os.path.basename(word) if not place or os.sep in word else ""
        if is_module:
            name = MODULES.get(word, "")
        part = _PART_OF_GIT.fullmatch(name)
        if name in BY_NAME:
            return Known(name, BY_NAME[name], words[place + 1 :])
        if part is not None:
            return Known("git", BY_NAME["git"], [part[1], *words[place + 1 :]])
        if not (word.startswith("-") if place else name in SHELLS or _INTERPRETER.fullmatch(name)):
            return None
        if place and re.fullmatch("-[a-zA-Z]*c", word):
            return None
        is_module = re.fullmatch("-[a-zA-Z]*m", word) is not None
    return None


def starters_of(process: int) -> Iterator[list[str]]:
    """The words of those processes of the attempt that have started a process, the nearest first."""
    process = parent_of(process)
    while process > 1 and is_own_process(process) and process != os.getpid():
        try:
            words = words_of(process)
        except (FileNotFoundError, ProcessLookupError):  # it has ended since, as a shell does behind `(program &)`
            return
        yield words
        process = parent_of(process)


def program_of(process: int) -> str:
    """The name of the program that a process runs, with that of the script where an interpreter runs one."""
    first, *more = words_of(process)
    names = [first, *(word for word in more[:1] if word and not word.startswith("-") and os.path.isfile(word))]
    return " ".join(map(os.path.basename, names)) or "a program"


def words_of(process: int) -> list[str]:
    """The words with which the program of a process was started. OSError if it has ended, or must not be looked at."""
    with open(f"/proc/{process}/cmdline", "rb") as file:
        return [os.fsdecode(word) for word in file.read().removesuffix(b"\0").split(b"\0")]
