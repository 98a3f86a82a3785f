"""A run's results for a program: `autoddp.load_run`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoddp.codec import decode
from autoddp.errors import NothingReadable
from autoddp.files import read_at_most
from autoddp.recipe import Recipe, parse
from autoddp.version import SUMMARY_SCHEMA

_MOST = 64 * 2**20  # bytes; a summary of a hundred trials has a quarter of a million


@dataclass(frozen=True)
class Run:
    """What a tuning run has found. Times are seconds per step.

    pandas.DataFrame(autoddp.load_run(".autoddp/20261126-033334-host0-14540").trials)
    """

    folder: Path
    summary: dict[str, Any]
    """The content of summary.json."""
    trials: tuple[dict[str, Any], ...]
    """One flat record for each trial, in order: `number`, `rung`, `state`, `reason`, `seconds`, `predicted`, `speedup`
    (of the trial, which only ranks), and a key for each setting that any trial has; None where a trial leaves it."""
    ladder: tuple[dict[str, Any], ...]
    """The best of each rung, from final rounds: `rung`, `seconds`, `speedup`, `low`, `high`, `configuration`."""
    recipe: Recipe | None
    """What was written, or would have been; None where the run was undecided."""
    diagnosis: dict[str, Any] | None
    """The diagnosis as `autoddp diagnose --json` prints it; None where none was made."""


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read the results of a run: `path` is its folder, or its summary.json.

    NothingReadable where that is no summary of this version's schema, OSError where it cannot be read.
    """
    place = Path(path)
    place = place / "summary.json" if place.is_dir() else place
    try:
        found: dict[str, Any] = decode(read_at_most(place, _MOST), dict)
    except ValueError as problem:
        raise NothingReadable(f"{place}: not the summary of a run: {problem}") from None
    if found.get("schema") != SUMMARY_SCHEMA:
        other = f"a summary of schema {SUMMARY_SCHEMA} was expected"
        raise NothingReadable(f"{place}: {other}; upgrade autoddp, or make the run again")
    trials = found.get("trials", [])
    names = sorted({name for trial in trials for name in trial["configuration"]})
    text = found.get("recipe_text", "")
    return Run(
        folder=place.parent,
        summary=found,
        trials=tuple(_record(trial, names, found) for trial in trials),
        ladder=tuple(_entry(standing) for standing in found.get("ladder", [])),
        recipe=parse(text, place) if text else None,
        diagnosis=found.get("diagnosis"),
    )


def _record(trial: dict[str, Any], names: list[str], summary: dict[str, Any]) -> dict[str, Any]:
    own = {name: trial[name] for name in ("number", "rung", "state", "reason", "seconds", "predicted")}
    seconds, baseline = trial["seconds"], summary["baseline"]["seconds"]
    settings = {name: trial["configuration"].get(name) for name in names}
    return {**own, "speedup": baseline / seconds if seconds else None, **settings}


def _entry(standing: dict[str, Any]) -> dict[str, Any]:
    gain = standing["speedup"]
    ends = {"speedup": gain["ratio"], "low": gain["low"], "high": gain["high"]}
    return {
        "rung": standing["rung"],
        "seconds": standing["seconds"],
        **ends,
        "configuration": standing["configuration"],
    }
