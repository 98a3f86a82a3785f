"""The last lines of a study: what was won and why, and the command to try next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from autoddp.knobs.configuration import BY_NAME
from autoddp.study import Outcome
from autoddp.units import ratio


def what_was_won(outcome: Outcome) -> list[str]:
    """One line with the gain, then one for each setting that is launched. No line if the script's settings stay."""
    launched = outcome.decision.configuration
    standing = next((one for one in outcome.ladder if one.configuration == launched), None)
    if not launched or standing is None:
        return []
    before, after = outcome.figure(outcome.before(standing)), outcome.figure(standing.seconds)
    gain = f"won: {after} {outcome.unit} in place of {before} (×{ratio(standing.speedup.ratio)}), because of"
    settings = launched.plain().items()
    return [gain, *(f"  {name}={json.dumps(value)}: {BY_NAME[name].says}" for name, value in settings)]


def try_next(outcome: Outcome, recipe: str, same_job: Sequence[str]) -> str:
    """The command to try next: with another rung allowed, if that is faster; else one that prints the ladder.

    `same_job`: the words that start the same script on one host; empty where that takes more than one command.
    """
    rung = outcome.decision.further
    if rung is None:
        return f"try next: autoddp recipe show {shlex.quote(recipe)}   # what each rung gives, and what it costs"
    options = ["--recipe", recipe, "--allow", rung.value]
    found = (standing.configuration.changes for standing in outcome.ladder if standing.rung is rung)
    changes = next(found, rung.changes)
    if not same_job:
        return f"try next: the same commands with {shlex.join(options)}   # {changes}"
    return f"try next: {shlex.join(['autoddp', *options, *same_job])}   # {changes}"
