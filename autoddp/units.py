"""Parses durations and sizes as people write them, and formats times, sizes, shares and errors."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

MIB = 2**20
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = r"(\d+(?:\.\d+)?)(us|µs|ms|s|m|h)"
_ENDLESS = 1e15  # from here on a number is shown with an exponent: nobody counts so many digits


def seconds(text: str) -> float:
    """Seconds from a text such as `90`, `90s`, `5m`, `1.5h`, `1h30m`, `20us` or `5ms`. ValueError for other texts.

    >>> seconds("5m"), seconds("1h30m"), seconds("45"), seconds("5ms")
    (300.0, 5400.0, 45.0, 0.005)
    """
    plain = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", plain):
        return float(plain)
    if not re.fullmatch(f"({_DURATION})+", plain):
        raise ValueError(f"{text!r} is not a duration: write 90s, 5m, 1.5h or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_DURATION, plain))


def byte_rate(text: str) -> float:
    """Bytes per second from a link's rate such as `25Gbit`, `100 Mbit/s` or `3GB/s`; units are decimal. ValueError.

    >>> byte_rate("8Gbit"), byte_rate("100 Mbit/s"), byte_rate("2.5GB/s")
    (1000000000.0, 12500000.0, 2500000000.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(bit|bps|b|B)(?:/s)?", text.strip())
    rate = float(found[1]) * 1000.0 ** " KMGT".index(found[2].upper() or " ") if found else 0.0
    if not found or not 0 < rate < math.inf:
        raise ValueError(f"{text!r} is not the rate of a link: write 25Gbit, 100Mbit or 3GB/s")
    return rate if found[3] == "B" else rate / 8


def byte_count(text: str) -> int:
    """Bytes from a text such as `512`, `64K`, `64M`, `1G`, `2T` or `64MiB`; units are binary. ValueError for others.

    >>> byte_count("64K"), byte_count("1 GiB"), byte_count("512")
    (65536, 1073741824, 512)
    """
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is not a size: write 64K, 64M or 1G")
    return int(found[1]) << 10 * " KMGT".index(found[2].upper() or " ")


@dataclass(frozen=True)
class Allowance:
    """How much of a disk may be used: a size, or a share of its free space. One of the two is 0.

    >>> Allowance.parse("20%").bytes_of(free=1000), Allowance.parse("1K").bytes_of(free=1000)
    (200, 1024)
    """

    size: int = 0
    """Bytes."""
    share: float = 0.0
    """Share of the free space, from 0 to 1."""

    @classmethod
    def parse(cls, text: str) -> Allowance:
        """Parse `20G` or `20%`. ValueError for other texts, for 0, and for more than 100 %.

        >>> Allowance.parse("20G"), Allowance.parse("20%")
        (Allowance(size=21474836480, share=0.0), Allowance(size=0, share=0.2))
        """
        share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
        found = cls(share=float(share[1]) / 100) if share else cls(size=byte_count(text))
        if not (found.size or 0 < found.share <= 1):
            raise ValueError(f"{text!r} allows nothing, or more than all: write 20G or 20%")
        return found

    def bytes_of(self, free: int) -> int:
        """The allowance in bytes if `free` bytes are free. A size may be more than that."""
        return self.size or int(self.share * free)


def duration(value: float) -> str:
    """Seconds as text for people, rounded to whole seconds.

    >>> duration(4.2), duration(75), duration(3700)
    ('4 s', '1 min 15 s', '1 h 1 min')
    """
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def milliseconds(value: float) -> str:
    """Seconds as a text in milliseconds with three significant digits.

    >>> milliseconds(1.1042), milliseconds(0.0283), milliseconds(0.00123), milliseconds(-0.0283)
    ('1104', '28.3', '1.23', '-28.3')
    """
    ms = value * 1e3
    if abs(ms) >= 99.95:
        return f"{ms:.0f}"
    return f"{ms:.1f}" if abs(ms) >= 9.995 else f"{ms:.2f}"


def figure(value: float, digits: int = 4) -> str:
    """A number with so many digits that count, without an exponent however many stand before its point.

    >>> figure(10.25), figure(51234.6), figure(112.4, 2)
    ('10.25', '51235', '112')
    """
    is_long = 10**digits - 0.5 <= abs(value) < _ENDLESS
    return f"{value:.0f}" if is_long else f"{value:.{digits}g}"


def ratio(value: float) -> str:
    """A ratio with three digits, zeros at its end too, which say how exact it is.

    >>> ratio(2.0), ratio(25.46), ratio(1204.0), ratio(0.333)
    ('2.00', '25.5', '1204', '0.333')
    """
    if not 1 / _ENDLESS < value < _ENDLESS:
        return f"{value:.3g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def percent(share: float, form: str = ".0f") -> str:
    """A share as a text in percent. `form` is the format of the number.

    >>> percent(0.64), percent(0.031, ".1f"), percent(-0.2, "+.0f")
    ('64 %', '3.1 %', '-20 %')
    """
    return f"{share * 100:{form}} %"


def data_size(count: int) -> str:
    """Bytes as a text with a binary unit.

    >>> data_size(25 * 2**20), data_size(512)
    ('25.0 MiB', '512 B')
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def gradient_error(relative: float, of_sum: float | None = None) -> str:
    """A relative error in percent, followed by that of the sum over several steps if it is less than half as large.

    >>> gradient_error(0.0029, 0.0025), gradient_error(0.71, 0.32)
    ('0.29 %', '71 % (of a sum 32 %)')
    """
    text = _error(relative)
    return f"{text} (of a sum {_error(of_sum)})" if of_sum is not None and of_sum < relative / 2 else text


def _error(share: float) -> str:
    return percent(share) if share >= 0.1 else percent(share, ".2g")


def ranks_text(ranks: Collection[int], all_of: int | None = None) -> str:
    """The ranks in words, with a range for three or more in a row.

    >>> ranks_text([3], 8), ranks_text([0, 1, 2, 3, 7], 8), ranks_text([0, 1], 2)
    ('rank 3', 'ranks 0 to 3, 7', 'all ranks')
    """
    numbers = sorted(set(ranks))
    if all_of is not None and len(numbers) == all_of > 1:
        return "all ranks"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"
