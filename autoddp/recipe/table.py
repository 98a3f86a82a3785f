"""One table of a recipe, read key by key: whatever is wrong ends as one line naming the file and the dotted key."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autoddp.errors import RecipeError, did_you_mean, shown


class Table:
    """A strict reader of one TOML table.

        fits = Table("train.autoddp.toml", "fits", {"world_size": 0})
        fits.only(["world_size", "nodes"])     # RecipeError for any other key
        fits.whole("world_size", low=1)        # RecipeError: … fits.world_size = 0: must be a whole number, 1 or more

    Not promised: that every key was read; a key named in `only` and never asked for goes unnoticed.
    """

    def __init__(self, file: str | Path, key: str, values: Mapping[str, Any]) -> None:
        self.file = one_line(str(file))
        self.key = key
        self.values = values

    def error(self, key: str, problem: str, *, show: bool = False) -> RecipeError:
        """The error to raise about `key`; `show` puts its value into the line."""
        value = f" = {shown(self.values[key])}" if show else ""
        return RecipeError(f"{self.file}: {self.dotted(key)}{value}: {problem}")

    def dotted(self, key: str) -> str:
        """`fits.nodes` for "nodes"; a key that is not a plain word is quoted."""
        word = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else shown(key)
        return f"{self.key}.{word}" if self.key else word

    def only(self, known: Iterable[str]) -> None:
        """Refuse every key that is not in `known`."""
        names = list(known)
        for key in self.values:
            if key not in names:
                raise self.error(key, f"unknown key{did_you_mean(key, names)}; correct or remove it")

    def get(self, key: str) -> Any:
        """The value as TOML gave it."""
        if key not in self.values:
            raise self.error(key, "missing; put it back, or tune again with --trials 20")
        return self.values[key]

    def text(self, key: str) -> str:
        """A line of printable text that is not blank: what a recipe says is shown on terminals."""
        value = self.get(key)
        if not isinstance(value, str) or not value.isprintable() or not value.strip():
            raise self.error(key, "must be one line of text in quotes", show=True)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of one or more such texts."""
        value = self.get(key)
        good = isinstance(value, list) and all(isinstance(v, str) and v.isprintable() and v.strip() for v in value)
        if not good or not value:
            raise self.error(key, 'must be a list of one or more texts, as ["cpu"]', show=True)
        return tuple(value)

    def whole(self, key: str, low: int) -> int:
        """A whole number, `low` or more."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.error(key, f"must be a whole number, {low} or more", show=True)
        if value >= 2**63:  # TOML's own limit, which Python's parser does not hold
            raise self.error(key, "too large for a whole number of 64 bits", show=True)
        return value

    def share(self, key: str) -> float:
        """A number from 0 to 1."""
        value = self.get(key)
        if not _is_number(value) or not 0 <= value <= 1:
            raise self.error(key, "must be a number from 0 to 1", show=True)
        return float(value)

    def positive(self, key: str) -> float:
        """A finite number above 0."""
        value = self.get(key)
        if not _is_number(value) or not 0 < value <= sys.float_info.max:
            raise self.error(key, "must be a finite number above 0", show=True)
        return float(value)

    def not_negative(self, key: str) -> float:
        """A finite number, 0 or more."""
        value = self.get(key)
        if not _is_number(value) or not 0 <= value <= sys.float_info.max:
            raise self.error(key, "must be a finite number, 0 or more", show=True)
        return float(value)

    def table(self, key: str, optional: bool = False) -> Table:
        """The table under `key`; an empty one where it may be absent and is."""
        value = {} if optional and key not in self.values else self.get(key)
        if not isinstance(value, dict):
            raise self.error(key, f"must be a table; write [{self.dotted(key)}] above its keys", show=True)
        return Table(self.file, self.dotted(key), value)

    def tables(self, key: str) -> list[Table]:
        """The array of tables under `key`; empty where it is absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self.error(key, f"must be tables; write [[{self.dotted(key)}]] above the keys of each", show=True)
        return [Table(self.file, f"{self.dotted(key)}[{place}]", entry) for place, entry in enumerate(value)]


def one_line(text: str) -> str:
    """`text` itself, or its repr where a line break or an escape sequence would spoil the line."""
    return text if text.isprintable() else repr(text)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
