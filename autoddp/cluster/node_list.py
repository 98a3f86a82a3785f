"""The first name in a list of nodes as Slurm writes it.

The whole list is nobody's to expand but Slurm's, whose `scontrol show hostnames` does it. Containers have no scontrol.
But the first name is read off the usual lists: each bracket begins with its first number, as it is written.
"""

from __future__ import annotations

import re
import shutil
import subprocess

_LETTERS = "[A-Za-z0-9._-]"
_NUMBERS = r"\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_NAME = f"(?:{_LETTERS}+|(?:{_LETTERS}+{_NUMBERS})+)"
_USUAL = re.compile(rf"({_NAME})(?:,{_NAME})*")
_BRACKET = re.compile(r"\[([0-9]+)[^\]]*\]")
_PATIENCE = 5  # seconds; scontrol answers from the text alone


def first_name(nodes: str) -> str | None:
    """The first name of a list; None if it is none of the usual ones, and no scontrol expands it.

    >>> first_name("n[01-04,07]"), first_name("gpu3,gpu7"), first_name("r[0-1]n[2-3],login")
    ('n01', 'gpu3', 'r0n2')
    """
    usual = _USUAL.fullmatch(nodes)
    return _BRACKET.sub(r"\1", usual[1]) if usual else _expanded(nodes)


def _expanded(nodes: str) -> str | None:
    program = shutil.which("scontrol")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "show", "hostnames", nodes], capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    names = done.stdout.split()
    # What cannot be expanded is repeated by scontrol as it is.
    return names[0] if names and re.fullmatch("[A-Za-z0-9._-]+", names[0]) else None
