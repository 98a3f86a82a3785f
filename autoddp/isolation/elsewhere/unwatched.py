"""Judges programs by their words, where the kernel does not show what they do, see `seccomp`.

So only those pass of which their words tell that they change nothing outside the run; all others end tuning.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

from autoddp.isolation.children import is_our_python
from autoddp.isolation.elsewhere.known import Known, tool_of
from autoddp.isolation.elsewhere.tools import changes_others
from autoddp.isolation.reporting import COMPILERS, READERS, SHELLS, only_reports, pipeline

_CHANGE_FILES = frozenset("cp mv rm ln mkdir rmdir touch chmod chown truncate gzip gunzip unzip".split())
"""Programs that change nothing but files, which the overlay covers. Guard judges these before."""


def _only_reads(known: Known) -> bool:
    """Whether a known program that changes nothing starts no other one either.

    git starts hooks, taskset and its like a program; those of which only some commands are named may start any.
    """
    return known.name != "git" and not known.tool.writes and known.tool.judge is not changes_others


def judge_unwatched(words: Sequence[str], env: Mapping[str, str]) -> str:
    """ "" if a program that is started with these words, and this environment, changes nothing outside the run.

    Else why it must not start.
    """
    name, arguments = os.path.basename(words[0]), list(words[1:])
    started = pipeline(arguments) if name in SHELLS else []
    if started:
        return next(filter(None, (judge_unwatched(each, env) for each in started)), "")
    known = tool_of(list(words))
    if known is not None and (known.changes or _only_reads(known)):
        return known.changes
    if name in READERS or name in _CHANGE_FILES or COMPILERS.fullmatch(name):
        return ""
    if is_our_python([shutil.which(words[0], path=env.get("PATH", os.defpath)) or words[0], *arguments]):
        return ""
    if only_reports(name, arguments, env, landlock=True):
        return ""
    return f"{name} may change something outside this run, and this kernel does not show what it does there"
