"""Measurements kept in the output folder: `.autoddp/bench/<key>.json`, one file for each kind of world."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from autoddp.bench.result import BenchResult, LinkFacts


def folder(output: Path) -> Path:
    """Where measurements lie within an output folder."""
    return output / "bench"


def store(output: Path, result: BenchResult) -> Path:
    """Keep a result, whole or not at all; where it lies. An older one of the same world is replaced. OSError."""
    place = folder(output) / f"{result.facts.key}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    # The folder may be shared, and every node keeps the result: each writes a file of its own first.
    temporary = place.with_name(f".{place.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(result.plain(), indent=1), encoding="utf-8")
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)
    return place


def load_cached(output: Path, facts: LinkFacts) -> BenchResult | None:
    """What was measured in a world like this one, or None; also None for a file that cannot be understood."""
    try:
        plain = json.loads((folder(output) / f"{facts.key}.json").read_text(encoding="utf-8"))
        result = BenchResult.from_plain(plain)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if result.facts == facts else None
