"""`autoddp predict FILE [--nodes N …]`: the step that a tuned job would have on other nodes, or with other settings."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from autoddp.cli.parser import Parser
from autoddp.codec import Meta, Struct, convert, field, finite, plain
from autoddp.errors import UsageError, first_line
from autoddp.files import read_at_most
from autoddp.knobs import AS_WRITTEN, BY_NAME, Configuration
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB, BUCKET_CAP_MB_LIST
from autoddp.knobs.hook import HOOK, HOOK_BY_NAME, HOOKS
from autoddp.log import printable, show, show_json
from autoddp.predict import Elsewhere, Profile, UnknownLink, computing_seconds, moved, step_seconds
from autoddp.recipe import load
from autoddp.units import byte_rate, milliseconds, percent, seconds
from autoddp.version import SUMMARY_SCHEMA

T = TypeVar("T")

_LARGEST = 256 * 2**20  # bytes; a summary of hundreds of ranks is a tenth of this
_MOST_RANKS = 1_000_000
_LONGEST_LATENCY = 60.0  # seconds
_MOST = 1e12  # keeps sums and products finite: of seconds, bytes and whatever else a summary has
_MOST_DIMENSIONS = 64  # of a tensor, in torch


class _Trial(Struct, frozen=True):
    """What is read of a trial."""

    configuration: dict[str, Any]
    state: str
    seconds: Annotated[float, Meta(ge=0, le=_MOST)] | None = None


class _Job(Struct, frozen=True):
    """What is read of the job's facts."""

    left_out: dict[str, str] = field(default_factory=dict)
    """Knob → why this job cannot have it."""


class _Decision(Struct, frozen=True):
    """What is read of the decision."""

    configuration: dict[str, Any]


@dataclass(frozen=True)
class _Known:
    """What a summary tells."""

    profile: Profile
    chosen: Configuration
    measured: Mapping[Configuration, float]
    """Configuration → seconds per step, where the study has measured it."""
    hooks: frozenset[Configuration]
    """The hooks that the study has measured, with their own knobs."""
    left_out: Mapping[str, str]
    """Knob → why autoddp leaves it as it is in this job."""


def run(arguments: list[str]) -> int:
    """The exit code of `autoddp predict` with these arguments; AutoddpError for what the user has to mend.

    run([".autoddp/20261121-102633-6013", "--nodes", "4"])
    run(["train.autoddp.toml", "--link", "25Gbit", "--hook", "bf16", "--json"])
    """
    options = _parser().parse_args(arguments)
    place = _summary_of(options.file)
    known = _read(place)
    there = Elsewhere(options.nodes, options.nproc_per_node, options.link, options.latency, options.batch_times or 1.0)
    try:
        profile, notes = moved(known.profile, there)
    except UnknownLink as unknown:
        raise UsageError(f"predict: {unknown}; say its rate, as in --link 25Gbit") from None
    if profile.world_size > _MOST_RANKS:
        raise UsageError(f"predict: more than {_MOST_RANKS} ranks: give smaller --nodes or --nproc-per-node")
    asked = _asked(known.chosen, options)
    rows = {"as written": AS_WRITTEN, "as tuned": known.chosen or None, "as asked": asked}
    if asked is not None:
        notes += _of_hook(asked, known)
        given = [BUCKET_CAP_MB.name] * (options.cap is not None) + [HOOK.name] * (options.hook is not None)
        why = known.left_out
        notes += [f"autoddp would leave {name} as it is in this job: {why[name]}" for name in given if name in why]
    same = profile == known.profile
    try:
        found = [_row(name, one, profile, known if same else None) for name, one in rows.items() if one is not None]
    except ValueError as problem:  # an argument of the script's that is none
        raise _broken(place, problem) from None
    answer = {
        "summary": str(place),
        "nodes": profile.nodes,
        "ranks": profile.world_size,
        "passes": profile.passes,
        "reductions": profile.reductions,
        "rows": found,
        "extrapolated": notes,
        "typical_error": profile.typical_error,
        "large_error": profile.large_error,
    }
    if options.json:
        show_json(finite(answer))
    else:
        _show(answer)
    return 0


def _of_hook(asked: Configuration, known: _Known) -> list[str]:
    """What is extrapolated where the study has not measured the hook that is asked for."""
    name = HOOK.of(asked)
    if not name or asked.hook in known.hooks:
        return []
    if name in map(HOOK.of, known.hooks):
        return [f"{asked.hook}: trials have measured this hook with other settings only"]
    if known.profile.hooks_are_measured:
        return [f"the hook {name}: no trial has measured it; what it computes was measured by itself"]
    return [f"the hook {name}: no trial has measured it, so what it computes is a guess"]


def _row(name: str, configuration: Configuration, profile: Profile, measured: _Known | None) -> dict[str, Any]:
    """A row of the answer: the step that is predicted with this configuration, and the measured one beside it.

    `measured`: what the study has measured; None where the prediction is for another job or place than the study's.
    """
    computing = computing_seconds(profile, configuration)
    predicted = step_seconds(profile, configuration) if profile.world_size > 1 else computing
    was = measured.measured.get(configuration) if measured else None
    return {
        "name": name,
        "configuration": configuration,
        "step_ms": None if predicted is None else predicted * 1e3,
        "computing_ms": computing * 1e3,
        "efficiency": min(1.0, computing / predicted) if predicted else None,
        "measured_ms": None if was is None else was * 1e3,
    }


def _show(answer: Mapping[str, Any]) -> None:
    from autoddp.tables import aligned  # here, because --json needs no rich

    head = ("", "ms per step", "efficiency", "measured", "configuration")
    rows = [
        (
            row["name"],
            "unknown" if row["step_ms"] is None else milliseconds(row["step_ms"] / 1e3),
            "" if row["efficiency"] is None else percent(row["efficiency"]),
            "" if row["measured_ms"] is None else milliseconds(row["measured_ms"] / 1e3),
            str(row["configuration"]),
        )
        for row in answer["rows"]
    ]
    computing = milliseconds(answer["rows"][0]["computing_ms"] / 1e3)
    ranks = (
        f"{answer['ranks']} rank{'s' * (answer['ranks'] != 1)} on {answer['nodes']} node{'s' * (answer['nodes'] != 1)}"
    )
    lines = [f"{ranks}, of which each computes {computing} ms per step", "", aligned([head, *rows]), ""]
    if answer["passes"] > 1:
        lines.insert(1, _passes(answer["passes"], answer["reductions"]))
    lines += [f"extrapolated: {note}" for note in answer["extrapolated"]]
    typical, large = answer["typical_error"], answer["large_error"]
    if typical is not None and large is not None:
        half, most = percent(typical, ".1f"), percent(large, ".1f")
        lines.append(f"in tuning half of its predictions were within {half}, nine of ten within {most}")
    show("\n".join(lines))


def _passes(passes: int, reductions: int) -> str:
    """A sentence about the backward passes of a step.

    >>> _passes(6, 6)
    'a step has 6 backward passes; as written, each of them reduces'
    >>> _passes(6, 1)
    'a step has 6 backward passes; as written, 1 of them reduces'
    """
    which = "each of them reduces" if reductions == passes else f"{reductions} of them reduce{'s' * (reductions == 1)}"
    return f"a step has {passes} backward passes; as written, {which}"


def _asked(chosen: Configuration, options: argparse.Namespace) -> Configuration | None:
    """The configuration of --cap and --hook, on top of the chosen one; None without both."""
    values = chosen.plain()
    if options.cap is not None:
        values.pop(BUCKET_CAP_MB_LIST.name, None)
        values[BUCKET_CAP_MB.name] = options.cap
    if options.hook is not None:
        values = {name: value for name, value in values.items() if name not in chosen.hook and name != HOOK.name}
        values = {n: v for n, v in values.items() if BY_NAME[n].needs is None}
        values |= options.hook
    if options.cap is None and options.hook is None:
        return None
    return Configuration(values)


# What the file tells.


def _summary_of(file: str) -> Path:
    """The summary that a file or a run's folder stands for: of a recipe, that of its run."""
    if not file:
        raise UsageError("predict: the file's name is empty; name a run's folder, its summary.json, or its recipe")
    place = Path(file)
    if os.path.isdir(place):  # Path's own method raises an error where the name is too long, or may not be looked at
        return place / "summary.json"
    if place.suffix != ".toml":
        return place
    run = load(place).evidence.run
    if not run:
        raise UsageError(f"predict: {printable(file)}: a recipe without its run; name the run's summary.json")
    # Where the current folder takes no files, a recipe lies in a folder of the user's, beside runs/ (`usual_folders`).
    for folder in (place.parent / ".autoddp", place.parent / "runs", Path(".autoddp")):
        if os.path.isfile(folder / run / "summary.json"):
            return folder / run / "summary.json"
    raise UsageError(
        f"predict: {printable(file)}: a recipe has too little, and its run's folder {printable(run)} is not in "
        f".autoddp/ beside it; name the run's summary.json"
    )


def _read(place: Path) -> _Known:
    name = printable(str(place))
    try:
        content = read_at_most(place, _LARGEST + 1)
        if len(content) > _LARGEST:
            raise UsageError(f"predict: {name}: larger than {_LARGEST >> 20} MiB, so it is no summary of a run")
        found = json.loads(content)
    except OSError as problem:
        raise UsageError(f"predict: {name}: {problem.strerror}; name the summary.json of a run") from None
    except (ValueError, RecursionError):
        raise UsageError(f"predict: {name}: not JSON; name the summary.json of a run") from None
    if isinstance(found, dict) and found.get("objective"):
        raise UsageError(f"predict: {name}: of a run with --objective; name the run of a job that uses DDP")
    if not isinstance(found, dict) or "trials" not in found or "decision" not in found:
        raise UsageError(f"predict: {name}: not the summary of a tuning run; name .autoddp/<run>/summary.json")
    if found.get("schema") != SUMMARY_SCHEMA:
        raise UsageError(
            f"predict: {name}: a summary of schema {SUMMARY_SCHEMA} was expected; upgrade autoddp, or tune again"
        )
    if not found.get("profile"):
        why = found.get("why_no_profile") or "tuning ended before any step was recorded; tune again"
        raise UsageError(f"predict: {name}: its run cannot be predicted: {printable(str(why))}")
    try:
        profile = convert(found["profile"], Profile)
        _check(profile)
        job = convert(found.get("job") or {}, _Job)
        chosen = Configuration(convert(found["decision"], _Decision).configuration)
        ran = [one for one in convert(finite(found["trials"]), tuple[_Trial, ...]) if one.state != "failed"]
        tried = [(Configuration(one.configuration), one) for one in ran]
    except ValueError as problem:
        raise _broken(place, problem) from None
    measured = {c: one.seconds for c, one in tried if one.state == "measured" and one.seconds is not None}
    if profile.measured is not None:
        measured[AS_WRITTEN] = profile.measured
    return _Known(profile, chosen, measured, frozenset(configuration.hook for configuration, _ in tried), job.left_out)


def _broken(place: Path, problem: Exception) -> UsageError:
    return UsageError(f"predict: {printable(str(place))}: broken: {printable(first_line(problem))}; tune again")


def _check(profile: Profile) -> None:
    """ValueError for a profile that cannot have been measured."""
    found = plain(profile)
    found["link"] = [(one["from_bytes"], one["seconds_per_byte"]) for one in found["link"]["segments"]]
    # Of further segments the line at no bytes, where they are not used, may be below 0.
    lines = [one.alpha_seconds for one in profile.link.segments]
    if not all(0 <= one <= _MOST for one in (*_numbers(found), *lines[:1], *map(abs, lines))) or profile.computing <= 0:
        raise ValueError("profile: times and sizes must be positive")
    if any(len(one.shape) > _MOST_DIMENSIONS or one.elements > one.bytes for one in profile.gradients):
        raise ValueError("profile: a gradient has more values than bytes")
    if len(profile.ready) != len(profile.gradients) or not profile.gradients:
        raise ValueError("profile: every gradient needs the time at which it is ready")
    if not 1 <= profile.reductions <= profile.passes:
        raise ValueError("profile: a step needs backward passes, some of which reduce")
    if not 1 <= profile.nodes <= profile.world_size <= _MOST_RANKS or not profile.link.segments:
        raise ValueError("profile: nodes, ranks or link are missing")


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in it, at any depth."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)


# The command line.


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="autoddp predict",
        allow_abbrev=False,
        description="The step that a tuned job would have elsewhere, from what tuning has measured.",
    )
    parser.add_argument("file", metavar="FILE", help="a run's folder, its summary.json, or its recipe")
    number = _of(_whole, "a whole number from 1 to 1000000")
    parser.add_argument("--nodes", metavar="N", type=number, help="nodes")
    parser.add_argument("--nproc-per-node", metavar="N", type=number, help="ranks on each node")
    parser.add_argument("--link", metavar="RATE", type=_of(byte_rate), help="rate of each node's link, as 25Gbit")
    parser.add_argument("--latency", metavar="TIME", type=_of(_latency), help="of a small message, one way, as 20us")
    parser.add_argument("--cap", metavar="MIB", type=_of(_cap), help="bucket_cap_mb")
    parser.add_argument("--hook", metavar="HOOK", type=_of(_hook), help=_hooks_in_words())
    parser.add_argument("--batch-times", metavar="X", type=_of(_times), help="a batch X times as large on each rank")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _of(read: Callable[[str], T], rule: str = "") -> Callable[[str], T]:
    """`type` of an option: argparse shows the text of an error only if it is its own."""

    def typed(text: str) -> T:
        try:
            return read(text)
        except ValueError as problem:
            said = f"{text!r} is not {rule}" if rule else str(problem)
            raise argparse.ArgumentTypeError(printable(said)) from None

    return typed


def _whole(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 8 else 0
    if not 1 <= number <= _MOST_RANKS:
        raise ValueError
    return number


def _latency(text: str) -> float:
    found = seconds(text)
    has_unit = not text.strip()[-1:].isdigit() or not found  # a number alone would be taken for seconds
    if not has_unit or not 0 <= found <= _LONGEST_LATENCY:
        raise ValueError(f"{text!r} is no latency of a link: write 20us or 0.5ms")
    return found


def _times(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.001 <= number <= 1000:
        raise ValueError(f"{text!r} is not a number from 0.001 to 1000")
    return number


def _cap(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    rule = BUCKET_CAP_MB.check(number)
    if rule:
        raise ValueError(f"{text!r}: {rule}")
    return number


def _hooks_in_words() -> str:
    """`bf16, fp16, powersgd or powersgd:RANK`."""
    with_rank = ", ".join(f"{hook.name}:RANK" for hook in HOOKS if hook.rank_knob)
    return f"{', '.join(sorted(HOOK_BY_NAME))} or {with_rank}"


def _hook(text: str) -> dict[str, Any]:
    name, colon, rank = text.partition(":")
    hook = HOOK_BY_NAME.get(name)
    if hook is None or (colon and not hook.rank_knob):
        names = ", ".join(hook.name for hook in HOOKS)
        with_rank = ", ".join(f"{hook.name}:RANK" for hook in HOOKS if hook.rank_knob)
        raise ValueError(f"{text!r} is none of {names} and {with_rank}")
    values: dict[str, Any] = hook.values(1)
    if colon:
        values[hook.rank_knob] = int(rank) if rank.isascii() and rank.isdigit() else rank
    return dict(Configuration(values).plain())
