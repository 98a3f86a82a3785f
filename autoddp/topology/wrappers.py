"""Takes a tool's output out of what others have wrapped around its lines: containers' logs, quotes, markdown tables.

    unwrapped('{"log":"host:1:2 [0] NCCL INFO Using network IB\\n","stream":"stdout","time":"…"}')

Only wrappers of which public samples exist are known: Docker's json-file driver, what CRI, kubectl and Ray write before
a line, `> ` of mail and issues, `|` of a markdown table (GitHub's, or copied from its page), `[repeated 7x across
cluster]` with which Ray ends a line, and lines that a terminal has broken at its last column.
"""

from __future__ import annotations

import codecs
import json
import re
from itertools import pairwise

_QUOTE = re.compile(r"(?:> ?){1,8}")
_COLOUR = r"(?:\x1b\[[0-9;]{0,8}m)?"
_WHOSE = re.compile(
    r"(?:\[pod/[^\]\s]{1,300}\] )?"  # kubectl logs --prefix
    r"(?:[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,20}(?:Z|[+-][0-9]{2}:[0-9]{2}) (?:std(?:out|err) [FP] )?)?"  # CRI
    rf"(?:{_COLOUR}\([A-Za-z_][A-Za-z0-9_.:-]{{0,99}} pid=[0-9]{{1,10}}(?:, ip=[0-9a-f.:]{{2,45}})?\){_COLOUR} ){{0,3}}"
)
"""What containers and Ray write before a line. NCCL's lines are found behind anything; those of other tools are not."""
_REPEATED = re.compile(r" ?\[repeated [0-9]{1,9}x across cluster\].{0,400}$")
_DOCKERS = '{"log":"'
_ROW = r"[ \t]*(?:GPU|NIC|mlx5_)[0-9]|Legend|[ \t]{0,8}[A-Z]+ += "
_BEGINS = re.compile(rf"$|.{{0,120}}[NR]CCL (?:INFO|WARN|version) |{_ROW}")
_UNDER_HEADING = re.compile(r"\|?(?:[ \t]*:?-{2,32}:?[ \t]*\|){1,200}[ \t]*(?::?-{2,32}:?)?")  # begins with no blank
_BOMS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig"}


def decoded(content: bytes) -> str:
    """The text of a file, which Windows may have written in UTF-16; bytes that are no text are replaced."""
    encoding = next((name for mark, name in _BOMS.items() if content.startswith(mark)), "utf-8")
    return content.decode(encoding, errors="replace")


def unwrapped(text: str) -> str:
    """The text with each line taken out of its wrapper; lines without one stay as they are.

    >>> unwrapped("> GPU0 | X | PHB\\n> -- | -- | --")
    'GPU0 \\t X \\t PHB\\n'
    """
    found = [_unwrapped_line(line) for line in text.split("\n")]
    if any(map(_is_under_heading, found)):
        found = ["" if _is_under_heading(line) else _cells(line) for line in found]
    return "\n".join(found)


def rejoined(text: str) -> str:
    """The text with those lines joined that a terminal has broken: as wide as the widest, which several lines are.

    A line that begins as a message or a row does is none that was broken off.

    >>> rejoined("Using netw\\nork IB\\nshort\\nUsing netw\\nork Socket")
    'Using network IB\\nshort\\nUsing network Socket'
    """
    lines = text.split("\n")
    width = max(map(len, lines))
    if sum(len(line) == width for line in lines) < 2:
        return text
    found = lines[:1]
    for before, line in pairwise(lines):
        if len(before) == width and not _BEGINS.match(line):
            found[-1] += line
        else:
            found.append(line)
    return "\n".join(found)


def _unwrapped_line(line: str) -> str:
    if line.startswith(_DOCKERS):
        try:
            inside = json.loads(line)["log"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return line
        line = inside.removesuffix("\n") if isinstance(inside, str) else line
    if quoted := _QUOTE.match(line):
        line = line[quoted.end() :]
    if whose := _WHOSE.match(line):
        line = line[whose.end() :]
    return _REPEATED.sub("", line) if "[repeated " in line else line


def _is_under_heading(line: str) -> bool:
    """Whether it is the line between the heading of a markdown table and its rows."""
    return bool(_UNDER_HEADING.fullmatch(line.strip()))


def _cells(line: str) -> str:
    """The cells of a row of a markdown table, which may begin and end with `|`, between tabs."""
    return line.replace("|", "\t").removeprefix("\t") if "|" in line else line
