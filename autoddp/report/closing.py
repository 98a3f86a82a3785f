"""The last two lines of a study: what was won and why, and the command to try next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from autoddp.knobs import Configuration
from autoddp.knobs.configuration import BY_NAME
from autoddp.study import Outcome
from autoddp.units import milliseconds


def what_was_won(outcome: Outcome) -> str:
    """One sentence with what each setting that is launched does; "" where the settings stay as they are."""
    launched = outcome.decision.configuration
    standing = next((one for one in outcome.ladder if one.configuration == launched), None)
    if not launched or standing is None:
        return ""
    before, after = milliseconds(outcome.baseline_seconds), milliseconds(standing.seconds)
    return f"won: a step takes {after} ms in place of {before} (×{standing.speedup.ratio:.2f}), by {_reasons(launched)}"


def try_next(outcome: Outcome, recipe: str, same_job: Sequence[str]) -> str:
    """The command that shows most: with another rung, if one gives more; else one that prints the ladder.

    `same_job` are the words that start the same script on one host; empty where that takes more than one command.
    """
    rung = outcome.decision.further
    if rung is None:
        return f"try next: autoddp recipe show {shlex.quote(recipe)}   # what each rung gives, and what it costs"
    options = ["--recipe", recipe, "--allow", rung.value]
    if not same_job:
        return f"try next: the same commands with {shlex.join(options)}   # {rung.changes}"
    return f"try next: {shlex.join(['autoddp', *options, *same_job])}   # {rung.changes}"


def _reasons(configuration: Configuration) -> str:
    """Each setting with what it does."""
    settings = configuration.plain().items()
    return "; ".join(f"{name}={json.dumps(value)} ({BY_NAME[name].says})" for name, value in settings)
