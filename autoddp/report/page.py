"""report.html: one file that a browser shows without a server, a script or anything from outside.

    write_page(Path("report.html"), json.loads(summary_text))

It has what a run's summary.json has, in plain words and pictures. What the summary lacks, and what is wrong in it, is
left out and named in the list of what was not measured. Texts of others (names, configurations, errors) are shown as
they are, without effect: jinja2 escapes them, control characters and those that turn the direction of writing are
shown as Python escapes, and a content security policy in the page forbids scripts and requests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from autoddp import timing
from autoddp.diagnose.causes import in_words
from autoddp.errors import AutoddpError, UsageError
from autoddp.files import write_whole
from autoddp.knobs import BY_NAME, Configuration, Rung
from autoddp.log import printable, printable_lines
from autoddp.own_code import lines_for
from autoddp.recipe import parse
from autoddp.report import page_pictures as pictures
from autoddp.report.page_content import Headroom, PageContent, RankStages, Standing, Values, page_content
from autoddp.units import data_size, duration, figure, gradient_error, milliseconds, percent, ranks_text, ratio
from autoddp.version import __version__

_SHARED = ("transfer", "waiting", "buffers")  # stages that end on all ranks together
_MARK = b'<meta name="generator" content="autoddp'
_BEGINNING = 4096  # bytes in which a page shows that it is autoddp's
_MOST_LEFT_OUT = 20  # parts of the summary that are named one by one
_MOST_RANKS = 1024  # in a picture or a table: a page has some kilobytes for each


def write_page(path: Path, summary: Mapping[str, Any]) -> Sequence[str]:
    """Whole or not at all, for this user alone. Returns which parts of the summary are wrong and left out, and why.

    OSError; ValueError if `summary` is no summary; UsageError if another file is at `path`, which may be a report of
    somebody else's.
    """
    content = page_content(summary)
    text = _html(content)
    _require_replaceable(path)
    write_whole(Path(os.path.realpath(path)), text, private=True)  # a linked report stays a link
    return content.left_out


def page(summary: Mapping[str, Any]) -> str:
    """The page's HTML. ValueError if `summary` is not a summary of this schema."""
    return _html(page_content(summary))


def _html(content: PageContent) -> str:
    try:
        return _page_of(content)
    except RecursionError as error:  # a configuration of lists in lists
        raise ValueError(str(error)) from error


def _require_replaceable(path: Path) -> None:
    if not os.path.lexists(path):
        return
    name = printable(str(path))
    if not path.is_file():
        raise UsageError(f"{name}: no regular file, so no report is written there; name another file with --output")
    with path.open("rb") as file:
        begins = file.read(_BEGINNING)
    if begins and _MARK not in begins:
        raise UsageError(f"{name}: not a report of autoddp, so it is not replaced; name another file with --output")


def _page_of(content: PageContent) -> str:
    shown = (
        _environment()
        .get_template("page.html")
        .render(
            content=content,
            version=__version__,
            stages=pictures.STAGES,
            rungs=pictures.RUNGS,
            as_written=_as_written(content),
            before_trials=_before_trials(content),
            launched=content.launched,
            before=_before(content),
            further=_further(content),
            knobs={name: knob.says for name, knob in BY_NAME.items()},
            predicts=any(one.predicted is not None for one in content.trials),
            prediction_error=_prediction_error(content),
            not_measured=list(_not_measured(content)),
            **_pictures(content),
        )
    )
    return f"{shown}\n"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ms": lambda seconds: f"{milliseconds(seconds)} ms",
        "of_ms": lambda ms: milliseconds(abs(ms) / 1e3),
        "percent": _share,
        "sentence": _sentence,
        "headroom": _headroom,
        "settings": _settings,
        "changes": _changes,
        "by": _by,
        "own_code": _own_code,
        "in_words": in_words,
        "error": _error,
        "stages_of": pictures.stages_of,
        "size": data_size,
        "duration": duration,
        "figure": figure,
        "times": lambda value: f"×{ratio(value)}",
        "ratio": ratio,
    }
    return environment


def _own_code(content: PageContent) -> str:
    """The recipe's settings as Python for plain DDP; "" where there is nothing to say or no recipe that can be read."""
    name = content.recipe or "the recipe"
    try:
        return lines_for(parse(content.recipe_text, name), printable(name), "ddp").text
    except AutoddpError:
        return ""


def _printable(value: Any) -> Any:
    """Texts of others: without control characters. A macro's result, which is HTML, has passed here already."""
    return printable_lines(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _pictures(content: PageContent) -> dict[str, Any]:
    """Pictures by name; what cannot be drawn is empty or None."""
    found = content.diagnosis
    ranks = found.ranks if found else ()
    steps = found.waterfall if found else ()
    last = steps[-1].step_ms if len(steps) > 1 else None
    shown = _slowest(ranks)
    numbers = {one.rank for one in shown}
    recorded = [one for one in content.timelines if not numbers or one.rank in numbers][:_MOST_RANKS]
    return {
        "shown": shown,
        "left_out": len(content.timelines) - len(recorded),
        "bars": pictures.stage_bars(ranks, found.mended if found else (), last) if ranks else [],
        "waterfall": pictures.waterfall(steps) if len(steps) > 1 else [],
        "heat": pictures.heat_map(shown) if shown else [],
        # With a rank missing here, those of a finding may be as many as are left, and yet not all of them.
        "all_ranks": len(ranks) if ranks and not content.is_left_out("diagnosis.ranks") else None,
        "ranks_text": ranks_text,
        "step": pictures.one_step(recorded),
        "ladder": list(zip(content.ladder, pictures.ladder(content.ladder), strict=True)),
        "trials_picture": pictures.trials(content.trials, _before_trials(content)) if content.trials else "",
    }


def _slowest(ranks: Sequence[RankStages]) -> Sequence[RankStages]:
    """All of them; of very many, those that need longest by themselves, in their order."""
    if len(ranks) <= _MOST_RANKS:
        return ranks
    own = [sum(ms for name, ms in pictures.stages_of(one).items() if name not in _SHARED) for one in ranks]
    return [ranks[place] for place in sorted(sorted(range(len(ranks)), key=lambda n: -own[n])[:_MOST_RANKS])]


def _as_written(content: PageContent) -> float | None:
    """Seconds of a step as written: the median of the final rounds, as the ladder has it, else of the baseline."""
    rounds = content.baseline_rounds
    return timing.median(rounds) if rounds else _before_trials(content)


def _before(content: PageContent) -> float | None:
    """Seconds of a step as written in the rounds of what is launched, with which its speed-up compares it."""
    one = content.launched
    rounds = content.baseline_rounds[: len(one.rounds)] if one else []
    return timing.median([max(seconds, one.pace) for seconds in rounds]) if one and rounds else _as_written(content)


def _before_trials(content: PageContent) -> float | None:
    """Seconds of a step as written at the beginning, with which trials are compared."""
    return content.baseline.seconds if content.baseline else None


def _further(content: PageContent) -> Standing | None:
    """The rung that another --allow would launch."""
    rung = content.decision.further if content.decision else ""
    return next((one for one in content.ladder if rung and one.rung == rung), None)


def _settings(values: Values) -> str:
    return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items()) or "as written"


def _changes(one: Standing) -> str:
    """What it changes in training; of settings that this version does not know, what their rung changes."""
    try:
        return Configuration(one.configuration).changes
    except ValueError:
        return next((rung.changes for rung in Rung if rung.value == one.rung), "")


def _by(one: Standing) -> str:
    """What it sets, in words; settings that this version does not know by their names."""
    try:
        return "; ".join(Configuration(one.configuration).in_words)
    except ValueError:
        return _settings(one.configuration)


def _headroom(found: Headroom) -> str:
    """The headroom as the terminal shows it."""
    low, high = found.interval or (found.share, found.share)
    return str(timing.Headroom(found.share, low, high))


def _share(share: float) -> str:
    return percent(share) if share >= 0.0995 else percent(share, ".1f")


def _sentence(text: str) -> str:
    """A text with a capital letter at its beginning, unless that is a name such as `data_loader`, and with a period."""
    first = text.split(" ")[0].rstrip(",:;")
    begun = text[0].upper() + text[1:] if first.isalpha() and first.islower() else text
    return begun if begun.endswith((".", "!", "?", "…")) else f"{begun}."


def _error(one: Standing) -> str:
    error = one.error
    return gradient_error(error.relative, error.of_sum) if error is not None and error.relative is not None else "0"


def _prediction_error(content: PageContent) -> float | None:
    errors = [
        abs(one.predicted - one.seconds) / one.seconds
        for one in content.trials
        if one.seconds and one.predicted is not None
    ]
    return timing.median(errors) if errors else None


def _not_measured(content: PageContent) -> Iterator[str]:
    """A sentence for each part that the page lacks."""
    for told in content.left_out[:_MOST_LEFT_OUT]:
        yield f"A part of summary.json is wrong and left out here: {told}"
    if len(content.left_out) > _MOST_LEFT_OUT:
        yield f"{len(content.left_out) - _MOST_LEFT_OUT} more parts of summary.json are wrong and left out here."
    yield from (sentence for part, sentence in _lacking(content) if not content.is_left_out(part))


def _lacking(content: PageContent) -> Iterator[tuple[str, str]]:
    """What the summary does not have: the place in it, and a sentence that says what the page is without for it."""
    if content.objective is not None:
        yield from _lacking_of_starts(content)
        return
    found = content.diagnosis
    if found is None:
        yield (
            "diagnosis",
            "Why a step takes its time: no diagnosis was made in this run, so no stage and no cause has a price.",
        )
    else:
        yield from (("", sentence) for sentence in found.not_measured)
    if found is not None and found.step_ms is not None:
        if not found.ranks:
            yield "diagnosis.ranks", "The stages of a step on each rank."
        if len(found.waterfall) < 2:
            yield "diagnosis.waterfall", "A step after mending causes: none was proved, or none could be tried."
        elif not found.mended:
            yield "diagnosis.mended", "The stages of a step with all causes mended: only its length is known."
        if found.samples_per_second is None:
            yield (
                "diagnosis.samples_per_second",
                "Samples per second: the batches do not come from a loader of torch's.",
            )
    if not any(one.steps for one in content.timelines):
        yield "timelines", "One step of all ranks: no step was recorded."
    if not content.trials:
        yield "trials", "Other settings: no trial was run."
    if content.baseline is not None:  # of a study
        yield from _not_studied(content)
    if not content.topology:
        yield "topology", "The topology of this host."
    if not content.what_if:
        yield "what_if", "This job on other machines: nothing was predicted."


def _lacking_of_starts(content: PageContent) -> Iterator[tuple[str, str]]:
    assert content.objective is not None
    yield (
        "diagnosis",
        "Why it takes its time: autoddp diagnose with the same script says what its communication costs.",
    )
    if len(content.objective.starts) < 2:  # the first one is the script as written
        yield "objective.starts", "Other settings: none was tried."
    elif not content.objective.rounds.as_written:
        yield (
            "objective.rounds",
            "Final rounds: no setting was better than the script as written, or there was no time.",
        )
    if not content.recipe_text:
        yield "recipe_text", "The recipe: it is not part of this summary."
    if not content.topology:
        yield "topology", "The topology of this host."


def _not_studied(content: PageContent) -> Iterator[tuple[str, str]]:
    if content.headroom is None:
        yield "headroom", "The headroom: no steps without reduction were run."
    if content.trials and all(one.predicted is None for one in content.trials):
        yield "trials", "Predictions of the trials: none was made."
    if not content.ladder:
        yield "ladder", "The ladder: no configuration reached the final rounds."
    if not content.recipe_text:
        yield "recipe_text", "The recipe: it is not part of this summary."
