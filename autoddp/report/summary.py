"""summary.json: a whole study for programs, every block's times included. Arithmetic only, no drawing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoddp.codec import plain
from autoddp.files import write_whole
from autoddp.study import Outcome, Semifinal, Standing, TrialRecord
from autoddp.timing import Block

SCHEMA = 1


def summary(outcome: Outcome, wall_seconds: dict[str, float], recipe: str) -> dict[str, Any]:
    """JSON types only. Times are seconds per step unless the name says otherwise."""
    return {
        "schema": SCHEMA,
        "recipe": recipe,
        "job": plain(outcome.facts),
        "baseline": _trial(outcome.baseline),
        "headroom": {
            "share": outcome.headroom,
            "interval": list(outcome.headroom_interval),
            "without_reduction": list(outcome.headroom_block.seconds),
        },
        "trials": [_trial(record) for record in outcome.trials],
        "screened": [plain(one) | {"promising": one.promising} for one in outcome.screened],
        "finals": {
            "heats": [_semifinal(semifinal) for semifinal in outcome.semifinals],
            "baseline_rounds": _blocks(outcome.baseline_rounds),
            "finalists": [_standing(standing) for standing in outcome.finalists],
        },
        "ladder": [_standing(standing) for standing in outcome.ladder],
        "decision": {"configuration": outcome.decision.configuration.plain(), "why": outcome.decision.why},
        "steps": outcome.steps,
        "compilations": outcome.compilations,
        "wall_seconds": {**outcome.wall_seconds, **wall_seconds},
    }


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all. OSError."""
    write_whole(path, json.dumps(content, indent=1))


def _trial(record: TrialRecord) -> dict[str, Any]:
    return {
        "number": record.number,
        "rung": record.configuration.rung.value,
        "configuration": record.configuration.plain(),
        "state": record.state,
        "reason": record.reason,
        "seconds": record.seconds if record.blocks else None,
        "blocks": _blocks(record.blocks),
        "error": asdict(record.error) if record.error else None,
    }


def _standing(standing: Standing) -> dict[str, Any]:
    return {
        "rung": standing.rung.value,
        "configuration": standing.configuration.plain(),
        "seconds": standing.seconds,
        "speedup": asdict(standing.speedup),
        "speedup_low_over": {rung.value: low for rung, low in standing.speedup_low_over.items()},
        "rounds": _blocks(standing.rounds),
        "error": asdict(standing.error) if standing.error else None,
    }


def _semifinal(semifinal: Semifinal) -> list[dict[str, Any]]:
    return [{"configuration": c.plain(), "rounds": _blocks(blocks)} for c, blocks in semifinal.rounds.items()]


def _blocks(blocks: Sequence[Block]) -> list[list[float]]:
    return [list(block.seconds) for block in blocks]
