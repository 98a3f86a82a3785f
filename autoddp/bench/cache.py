"""Measurements kept in the output folder: `.autoddp/bench/<key>.json`, one file for each kind of world."""

from __future__ import annotations

from pathlib import Path

from autoddp.bench.result import BenchResult, LinkFacts
from autoddp.codec import decode, encode
from autoddp.files import write_whole


def folder(output: Path) -> Path:
    """Where measurements lie within an output folder."""
    return output / "bench"


def store(output: Path, result: BenchResult) -> Path:
    """Keep a result, whole or not at all; where it lies. An older one of the same world is replaced. OSError."""
    place = folder(output) / f"{result.facts.key}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, encode(result.plain(), indent=1))
    return place


def load_cached(output: Path, facts: LinkFacts) -> BenchResult | None:
    """What was measured in a world like this one, or None; also None for a file that cannot be understood."""
    try:
        text = (folder(output) / f"{facts.key}.json").read_text(encoding="utf-8")
        result = BenchResult.from_plain(decode(text, dict))
    except (OSError, ValueError):
        return None
    return result if result.facts == facts else None
