"""What outputs of tools share once people have copied them: colours, line ends, a last line that was cut."""

from __future__ import annotations

import re
from collections.abc import Sequence

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


def lines(text: str) -> list[str]:
    """The lines without colours and trailing blanks; the last one ends in `…` if it had no line end.

    >>> lines("Rate: 200\\r\\nRate: 10")
    ['Rate: 200', 'Rate: 10…']

    No reader of an open-ended value accepts the mark, so the 10 above, which may have been 100, is no number; where the
    end is certain all the same, `closed` takes the mark off.
    """
    # Only "\n" divides: str.splitlines would also divide at control characters that damage has put into a value.
    found = [line.rstrip() for line in _ESCAPES.sub("", text.removeprefix("\ufeff")).split("\n")]
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


def not_read(numbers: Sequence[int]) -> tuple[str, ...]:
    """One sentence about lines, counted from 1, that could not be read; none if there are none.

    >>> not_read([4, 7, 9, 12])
    ('lines 4, 7, 9 and 1 more could not be read',)
    """
    if not numbers:
        return ()
    listed = ", ".join(str(number) for number in numbers[:3])
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return (f"line{'s' if len(numbers) > 1 else ''} {listed}{more} could not be read",)


def nothing_readable(expected: str) -> NothingReadable:
    """The error for a text of which nothing could be understood; `expected` names the tool and a line of it."""
    return NothingReadable(f"nothing could be read: expected {expected}")
