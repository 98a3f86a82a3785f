"""What all readers of tools' outputs share: lines without colours, a mark on a cut line, and checks of single values.

Every reader follows one idea. It takes the text line by line, believes a line only if the whole of it has a known form,
and reports the others in `missing`. A text in which nothing has a known form raises NothingReadable.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from autoddp.errors import NothingReadable

CUT = "…"
"""Closes a last line that has no line end: it may go on."""

# Every repetition is bounded and no two can match the same text: linear for any bytes.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]{0,32}[ -/]{0,4}[@-~]"  # colours and cursor moves
    r"|\x1b\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)"  # window titles
    r"|\x1b[()][0-9AB]"  # character sets, as `tput sgr0` prints them
    r"|\[[0-9]{1,2}(?:;[0-9]{1,3}){0,4}m"  # colours that lost their escape character on the way
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@+-]{0,63}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_PCI = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def without_escapes(text: str) -> str:
    """The text without terminal colours, cursor moves and window titles."""
    return _ESCAPES.sub("", text)


def lines(text: str) -> list[str]:
    """The lines without colours and trailing blanks; the last one ends in `…` if it had no line end.

    >>> lines("Rate: 200\\r\\nRate: 10")
    ['Rate: 200', 'Rate: 10…']

    No reader of an open-ended value accepts the mark, so the 10 above, which may have been 100, is no number; where the
    end is certain all the same, `closed` takes the mark off.
    """
    # Only "\n" divides: str.splitlines would also divide at control characters that damage has put into a value.
    found = [line.rstrip() for line in without_escapes(text.removeprefix("\ufeff")).split("\n")]
    if found[-1]:
        found[-1] += CUT
    return found


def closed(value: str) -> str:
    """A value that shows its own end (a bracket, a unit, a word of a known list), without the mark of a cut line."""
    return value.removesuffix(CUT).rstrip()


def name(text: str) -> str | None:
    """A device's or an interface's name; None if it cannot be one, or may be cut."""
    return text if _NAME.fullmatch(text) else None


def number(text: str, most: int) -> int | None:
    """A number from 0 to `most`; None if it is none, or may be cut."""
    return value if _NUMBER.fullmatch(text) and (value := int(text)) <= most else None


def pci_address(text: str) -> str | None:
    """`0000:0f:00.0` or `0f:00.0`; None if it is neither."""
    return text if _PCI.fullmatch(text) else None


def some(things: Collection[str], most: int = 4) -> str:
    """The first `most` of the things; the others are counted.

    >>> some(["GPU0", "GPU1", "GPU2"], most=2)
    'GPU0, GPU1 and 1 more'
    """
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join([*things][:most]) + more


def not_read(numbers: Sequence[int]) -> tuple[str, ...]:
    """One sentence about lines, counted from 1, that could not be read; none if there are none.

    >>> not_read([4, 7, 9, 12])
    ('lines 4, 7, 9 and 1 more could not be read',)
    """
    if not numbers:
        return ()
    return (f"line{'s' if len(numbers) > 1 else ''} {some([*map(str, numbers)], most=3)} could not be read",)


def nothing_readable(expected: str, of_lines: int | None = None) -> NothingReadable:
    """The error for a text of which nothing could be understood.

    `expected` names the tool and a line of it. `of_lines`: lines that the text has, where it has lines.
    """
    read = "nothing could be read" if of_lines is None else f"0 of {of_lines} lines understood"
    return NothingReadable(f"{read}: expected {expected}")
