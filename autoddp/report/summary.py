"""summary.json: a whole study for programs, every block's times included. Arithmetic only, no drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoddp.codec import encode, finite, plain
from autoddp.files import write_whole
from autoddp.knobs import AS_WRITTEN
from autoddp.predict import what_if
from autoddp.settings import Objective
from autoddp.study import Outcome, Semifinal, Standing, TrialRecord
from autoddp.timing import Block
from autoddp.version import SUMMARY_SCHEMA


def summary(outcome: Outcome, wall_seconds: dict[str, float], recipe: str) -> dict[str, Any]:
    """The results of a study, for `write_summary`. Times are seconds per step unless the name says otherwise."""
    if outcome.objective is not None:
        return _of_objective(outcome, outcome.objective, wall_seconds, recipe)
    return {
        "schema": SUMMARY_SCHEMA,
        "recipe": recipe,
        "job": outcome.facts,
        "baseline": _trial(outcome.baseline),
        "headroom": {
            "share": outcome.headroom,
            "interval": outcome.headroom_interval,
            "without_reduction": outcome.headroom_block.seconds,
        },
        "diagnosis": outcome.diagnosis and outcome.diagnosis.plain(),
        "trials": [_trial(record) for record in outcome.trials],
        "screened": [plain(one) | {"promising": one.promising} for one in outcome.screened],
        "finals": {
            "heats": [_semifinal(semifinal) for semifinal in outcome.semifinals],
            "baseline_rounds": _blocks(outcome.baseline_rounds),
            "finalists": [_standing(standing) for standing in outcome.finalists],
        },
        "ladder": [_standing(standing) for standing in outcome.ladder],
        "decision": {
            "configuration": outcome.decision.configuration,
            "why": outcome.decision.why,
            "further": outcome.decision.further,
        },
        "steps": outcome.steps,
        "compilations": outcome.compilations,
        "profile": outcome.profile,
        "why_no_profile": outcome.why_no_profile,
        "what_if": what_if(outcome.profile, outcome.decision.configuration) if outcome.profile else [],
        "timelines": outcome.timelines,
        "wall_seconds": {**outcome.wall_seconds, **wall_seconds},
    }


def _of_objective(
    outcome: Outcome, objective: Objective, wall_seconds: dict[str, float], recipe: str
) -> dict[str, Any]:
    """The summary of a script without DDP: seconds of a step, or numbers as the script prints them; one for a start."""

    def numbers(blocks: Sequence[Block]) -> list[float]:
        return [objective.number(block.median) for block in blocks]

    launched = next((one for one in outcome.ladder if one.configuration == outcome.decision.configuration), None)
    return {
        "schema": SUMMARY_SCHEMA,
        "recipe": recipe,
        "job": outcome.facts,
        "objective": {
            "text": objective.text,
            "unit": "seconds per step" if objective.of_steps else objective.unit,
            "as_written": objective.number(outcome.baseline_seconds),
            "tuned": objective.number(launched.seconds) if launched else None,
            "gain": launched.speedup if launched else None,
            "starts": [
                {
                    "configuration": one.configuration,
                    "state": one.state,
                    "reason": one.reason,
                    "numbers": numbers(one.blocks),
                }
                for one in (outcome.baseline, *outcome.trials)
            ],
            "rounds": {
                "as_written": numbers(outcome.baseline_rounds),
                "finalists": [
                    {"configuration": one.configuration, "gain": one.speedup, "numbers": numbers(one.rounds)}
                    for one in outcome.finalists
                ],
            },
        },
        "decision": {"configuration": outcome.decision.configuration, "why": outcome.decision.why},
        "wall_seconds": {**outcome.wall_seconds, **wall_seconds},
    }


def summary_of_diagnosis(diagnosis: dict[str, Any], wall_seconds: dict[str, float]) -> dict[str, Any]:
    """The summary where nothing was studied but why the job is slow; `diagnosis` as it is printed for programs."""
    return {"schema": SUMMARY_SCHEMA, "diagnosis": diagnosis, "wall_seconds": wall_seconds}


def summary_without_study(why: str, wall_seconds: dict[str, float]) -> dict[str, Any]:
    """The summary where tuning was over before the script as written had been measured, for the reason `why`."""
    decision = {"configuration": AS_WRITTEN, "why": why}
    return {"schema": SUMMARY_SCHEMA, "trials": [], "decision": decision, "wall_seconds": wall_seconds}


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all. OSError. A number that is not finite becomes null, because JSON has no other word for it."""
    write_whole(path, encode(finite(content), indent=1), private=True)


def _trial(record: TrialRecord) -> dict[str, Any]:
    return {
        "number": record.number,
        "rung": record.configuration.rung,
        "configuration": record.configuration,
        "state": record.state,
        "reason": record.reason,
        "seconds": record.seconds if record.blocks else None,
        "blocks": _blocks(record.blocks),
        "error": record.error,
        "predicted": record.predicted,
    }


def _standing(standing: Standing) -> dict[str, Any]:
    return {
        "rung": standing.rung,
        "configuration": standing.configuration,
        "seconds": standing.seconds,
        "speedup": standing.speedup,
        "pace": standing.pace,
        "speedup_low_over": standing.speedup_low_over,
        "rounds": _blocks(standing.rounds),
        "error": standing.error,
    }


def _semifinal(semifinal: Semifinal) -> list[dict[str, Any]]:
    return [{"configuration": c, "rounds": _blocks(blocks)} for c, blocks in semifinal.rounds.items()]


def _blocks(blocks: Sequence[Block]) -> list[Sequence[float]]:
    return [block.seconds for block in blocks]
