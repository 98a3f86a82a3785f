"""`autoddp recipe show FILE`, `check FILE`, `code FILE`, `diff FILE FILE`: for people, or for a script with --json."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from autoddp.cli.parser import Parser
from autoddp.errors import AutoddpError
from autoddp.log import printable, show, show_json
from autoddp.own_code import FORMS, lines_for
from autoddp.recipe import Evidence, Fits, LadderEntry, Recipe, compare, load
from autoddp.timing import Speedup
from autoddp.units import data_size, figure, gradient_error, milliseconds, percent


def run(arguments: list[str]) -> int:
    """The exit code of `autoddp recipe` with these arguments.

        run(["show", "train.autoddp.toml"])
        run(["check", "train.autoddp.toml", "--json"])      # {"ok": true, …} or {"ok": false, "error": …}
        run(["code", "train.autoddp.toml", "--for", "ddp"]) # lines for the user's own code
        run(["diff", "a.toml", "b.toml"])                   # 1 if they differ, as diff has it

    AutoddpError for what the user got wrong; under --json a recipe's faults are printed instead.
    """
    options = _parser().parse_args(arguments)
    recipes = []
    for file in options.files if "files" in options else [options.file]:
        try:
            recipes.append(load(file))
        except AutoddpError as problem:
            if not options.json:
                raise
            return _fault(file, problem)
    if "form" in options:
        try:
            return _code(options.file, recipes[0], options.form, options.json)
        except AutoddpError as problem:  # a sound recipe that these lines cannot say
            if not options.json:
                raise
            return _fault(options.file, problem)
    if "files" in options:
        return _diff(options.files, recipes[0], recipes[1], options.json)
    (recipe,) = recipes
    answer: dict[str, Any] = options.data(recipe)
    text: Callable[[str, Recipe], str] = options.text
    if options.json:
        show_json({"ok": True, "file": options.file, **answer})
    else:
        show(text(printable(options.file), recipe))
    return 0


def _fault(file: str, problem: AutoddpError) -> int:
    """Tell a program why there is no answer; the exit code."""
    show_json({"ok": False, "file": file, "error": str(problem)})
    return problem.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="autoddp recipe", description="Look at a recipe.", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    show = commands.add_parser(
        "show", help="what it fits, what it launches and why, and the ladder", allow_abbrev=False
    )
    show.set_defaults(text=_show, data=lambda recipe: {"recipe": recipe.plain()})
    check = commands.add_parser("check", help="whether it is sound, and what it fits", allow_abbrev=False)
    check.set_defaults(text=_check, data=lambda recipe: {"fits": recipe.plain()["fits"]})
    for command in (show, check):
        command.add_argument("file", metavar="FILE", help="a recipe, such as proj.train.autoddp.toml")
    code = commands.add_parser(
        "code", help="its settings as lines for your own code, to start without autoddp", allow_abbrev=False
    )
    code.add_argument("file", metavar="FILE", help="a recipe, such as proj.train.autoddp.toml")
    forms = ", ".join(f"{name}: {form.says}" for name, form in FORMS.items())
    code.add_argument(
        "--for", dest="form", choices=tuple(FORMS), default="ddp", metavar="FORM", help=f"{forms} (default: ddp)"
    )
    diff = commands.add_parser("diff", help="what differs between two; exit code 1 if anything", allow_abbrev=False)
    diff.add_argument("files", metavar="FILE", nargs=2, help="two recipes")
    for command in (show, check, code, diff):
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _code(file: str, recipe: Recipe, form: str, as_json: bool) -> int:
    lines = lines_for(recipe, printable(file), form)
    if as_json:
        show_json({"ok": True, "file": file, "form": form, "code": list(lines.code), "by_hand": list(lines.by_hand)})
    else:
        show(lines.text)
    return 0


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    from autoddp.tables import aligned  # here, because --json needs no rich

    return aligned(rows)


def _diff(files: Sequence[str], one: Recipe, other: Recipe, as_json: bool) -> int:
    found = compare(one, other)
    if as_json:
        differences = {key: list(values) for key, values in found.items()}
        show_json({"ok": True, "files": list(files), "same": not found, "differences": differences})
    elif found:
        rows = [(key, *("-" if value is None else _cell(value) for value in values)) for key, values in found.items()]
        show(_aligned([("", *files), *rows]))
    else:
        show(" and ".join(map(printable, files)) + " say the same")
    return 1 if found else 0


def _cell(value: object) -> str:
    return figure(value) if isinstance(value, float) else str(value)


def _check(file: str, recipe: Recipe) -> str:
    return f"{file}: sound\nfits {_fits(recipe.fits)}"


def _show(file: str, recipe: Recipe) -> str:
    made, launched = recipe.made_by, recipe.configuration
    facts = [
        ("made by", f"autoddp {made.autoddp} with torch {made.torch} and Python {made.python}, {made.date}"),
        ("fits", _fits(recipe.fits)),
        ("launches", f"{launched} ({launched.rung.value}: {launched.changes})" if launched else _AS_WRITTEN),
        *([("sets", " ".join(f"{name}={value}" for name, value in sorted(recipe.env.items())))] if recipe.env else []),
        ("why", recipe.evidence.why),
        ("evidence", _evidence(recipe)),
    ]
    return "\n".join([file, "", _aligned(facts), "", _ladder(recipe.ladder)])


_AS_WRITTEN = "the script's own settings, as written"


def _fits(fits: Fits) -> str:
    devices = " and ".join(fits.devices)
    each = f" ({' and '.join(map(str, fits.ranks_of_nodes))})" if fits.ranks_of_nodes else ""
    return (
        f"{_count(fits.world_size, 'process', 'processes')} on {_count(fits.nodes, 'node', 'nodes')}{each}, {devices}, "
        f"{fits.backend}, torch {fits.torch}, {data_size(fits.gradient_bytes)} of gradients "
        f"(parameters {fits.parameters_digest})"
    )


def _evidence(recipe: Recipe) -> str:
    found = recipe.evidence
    headroom = "" if found.headroom is None else f"headroom {percent(found.headroom, '.1f')}{_interval(found)}, "
    objective = f"tuned for {found.objective}, " if found.objective else ""
    return (
        f"{objective}baseline {_measured(found.baseline_ms_per_step, found.baseline_value)}, {headroom}"
        f"{_count(found.trials, 'trial', 'trials')}, {_count(found.final_rounds, 'final round', 'final rounds')}, "
        f"{_count(found.steps, 'step', 'steps')} measured"
    )


def _measured(ms_per_step: float | None, value: float | None) -> str:
    """Milliseconds of a step, or the number that the script prints."""
    if ms_per_step is None:
        return f"{_printed(value)} as printed"
    return f"{milliseconds(ms_per_step / 1e3)} ms per step"


def _printed(value: float | None) -> str:
    assert value is not None  # a sound recipe has one where it has no milliseconds
    return figure(value)


def _interval(found: Evidence) -> str:
    low, high = found.headroom_low, found.headroom_high
    return "" if low is None or high is None else f" ({percent(low, '.1f')} to {percent(high, '.1f')})"


def _ladder(ladder: Sequence[LadderEntry]) -> str:
    if not ladder:
        return "The ladder is empty: no configuration reached the final rounds."
    rows = [
        (
            entry.rung.value,
            entry.configuration.changes,
            milliseconds(entry.ms_per_step / 1e3) if entry.ms_per_step is not None else _printed(entry.value),
            str(Speedup(entry.speedup, entry.speedup_low, entry.speedup_high)),
            _error(entry),
            str(entry.configuration),
        )
        for entry in ladder
    ]
    unit = "ms per step" if ladder[0].ms_per_step is not None else "as printed"
    from autoddp.tables import aligned_or_below  # here, because --json needs no rich

    # the configuration comes last because it is the one that can be long
    return aligned_or_below(
        [("rung", "what changes", unit, "speed-up (99 %)", "gradient error", "configuration"), *rows]
    )


def _error(entry: LadderEntry) -> str:
    if not entry.configuration.hook:
        return "0"
    if entry.gradient_error is None:
        return "not measured"
    return gradient_error(entry.gradient_error, entry.gradient_error_of_sum)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
