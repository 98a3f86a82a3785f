"""The tuning half of a run: tune, write the recipe and the summary, and turn what was found into a plan."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

from autoddp.errors import AutoddpError, NotTuned, UsageError
from autoddp.knobs import Configuration
from autoddp.knobs.hook import POWERSGD_RANK, POWERSGD_START_STEP, start_step
from autoddp.launch.deadline import command_given
from autoddp.launch.elastic import node_range
from autoddp.launch.hosts import Hosts
from autoddp.launch.isolating import choose_isolation
from autoddp.launch.keeper import Keeper
from autoddp.launch.mode import Plan
from autoddp.launch.nccl_logs import transports
from autoddp.launch.network import Network
from autoddp.launch.options import Request
from autoddp.launch.rank_count import set_one
from autoddp.launch.recipes import arguments_digest, place_for, remove_notes, script_names
from autoddp.launch.run_folder import RunFolder, temporary_folder
from autoddp.launch.tune import Preparation, Tuned, Tuning
from autoddp.launch.usual_folders import OUTPUT, elsewhere
from autoddp.recipe import Evidence, Fits, LadderEntry, MadeBy, Recipe, dump, parse, require_replaceable, save
from autoddp.report import Terminal, say, summary, try_next, warn, what_was_won, write_summary
from autoddp.study import Outcome
from autoddp.units import data_size
from autoddp.version import __version__


@contextlib.contextmanager
def prepared(request: Request) -> Iterator[Preparation]:
    """What tuning needs: made before any thread is started, because it forks, and removed whatever happens."""
    temporary_folder()
    # The recipe must take a file after minutes of tuning: its folder is looked at before them.
    if request.recipe is None:
        try:
            request.folders.make()
        except OSError as error:
            place = request.folders.recipes
            raise UsageError(f"{place}: cannot be written ({error.strerror}); name a file with --recipe") from None
    parent = request.recipe_path.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UsageError(f"--recipe {request.recipe_path}: its folder cannot be written; name another file")
    if request.recipe is not None:
        try:
            require_replaceable(Path(os.path.realpath(request.recipe)))
        except OSError as error:
            raise UsageError(
                f"--recipe {request.recipe}: cannot be read ({error.strerror}); name another file"
            ) from None
    places = (Path("/tmp"), Path("/var/tmp"))
    folder = _run_folder(request, places)
    for line in folder.says:
        say(line)
    keeper = Keeper()
    keeper.removes([os.path.dirname(folder.socket)])
    try:
        yield Preparation(folder, keeper, choose_isolation(request, folder, keeper))
    finally:
        keeper.close()
        folder.clean()


def _run_folder(request: Request, places: Sequence[Path]) -> RunFolder:
    try:
        return RunFolder(request.output, keep_runs=request.keep_runs, recipe=request.recipe_path, places=places)
    except UsageError as error:
        other = elsewhere() if request.output == OUTPUT else None
        if other is None:
            raise
        say(f"{error}; this run's goes to {other.output}")
        return RunFolder(other.output, keep_runs=request.keep_runs, recipe=request.recipe_path, places=places)


def tuned_plan(request: Request, plan: Plan, made: Preparation, network: Network, hosts: Hosts) -> Plan:
    """Run the tuning job; the plan to launch with. Whatever goes wrong, the job can still run as written."""
    folder = made.folder
    say(f"tuning {request.script}: {plan.trials} trials; logs in {folder.path}")
    terminal = Terminal(lambda c: c.allowed_by(plan.allow, plan.accumulate_up_to), folder.log, not request.tune_only)

    def write(outcome: Outcome, inputs: tuple[str, ...]) -> str:
        recipe = recipe_of(outcome, start_step(request.job_steps), folder.path.name)
        of_job = replace(recipe.fits, script=script_names(request)[0], inputs=inputs)
        made_by = replace(recipe.made_by, arguments=arguments_digest(request))
        return dump(replace(recipe, fits=of_job, made_by=made_by))

    tuning = Tuning(
        request,
        folder,
        made.keeper,
        made.isolation,
        hosts,
        terminal,
        write,
        say,
        warn,
        interfaces=network.together,
        began=command_given(),
    )
    try:
        tuned = tuning.run()
    finally:
        terminal.close()
    place = place_for(request, parse(tuned.recipe, request.recipe_path), say) if tuned.recipe else None
    if tuned.outcome is not None:
        content = summary(tuned.outcome, tuned.wall_seconds, str(place or request.recipe_path))
        found = transports(folder.path)
        try:
            write_summary(folder.summary, {**content, "network": asdict(network), "transports": found})
        except OSError as error:  # a full disk must not cost the launch
            say(f"warning: {folder.summary} could not be written: {error.strerror}")
        for finding in found.get("findings", ()):
            say(finding)
    if place is None:
        why = f"{tuned.why or 'the leading node gave up'}; see {folder.path}"
        if request.tune_only:
            raise NotTuned(f"no recipe was written: {why}")
        say(f"warning: not tuned, launching as written: {why}")
        if not request.ranks_given and not tuned.built_ddp:
            say(set_one(request.torchrun))
        return plan
    if tuned.cut_short:
        say(f"tuning ended early, with what was known: {tuned.cut_short}")
    place = _write(request, folder, tuned, place)
    if tuned.outcome is not None:
        _close(request, tuned.outcome, place)
    return replace(plan, recipe=parse(tuned.recipe, place), path=place)


def _close(request: Request, outcome: Outcome, place: Path) -> None:
    """The last lines before the job's own: what was won and why, and what to do with it."""
    for line in what_was_won(outcome):
        say(line)
    torchrun = request.torchrun
    words = ["--nproc-per-node", str(torchrun.nproc_per_node), *(["-m"] if torchrun.module else []), request.script]
    same_job = [*words, *torchrun.training_script_args] if node_range(torchrun)[1] == 1 else []
    say(try_next(outcome, str(place), same_job))


def _write(request: Request, folder: RunFolder, tuned: Tuned, place: Path) -> Path:
    """Save the recipe; where it stands, or should."""
    try:
        place, kept = _saved(tuned.recipe, place, folder.previous_recipe)
    except (AutoddpError, OSError) as error:
        if request.tune_only:
            raise NotTuned(f"the recipe could not be saved: {error}") from None
        say(f"warning: the recipe is used, but could not be saved: {error}")
        return place
    remove_notes(request)
    say(f"recipe written: {place}" + (f" (the older one is kept as {kept})" if kept else ""))
    recipe = parse(tuned.recipe, place)
    start = POWERSGD_START_STEP.of(recipe.configuration)
    if start:
        memory = data_size(recipe.fits.gradient_bytes)
        say(
            f"PowerSGD begins after {start} exact reductions (powersgd_start_step in the recipe), and keeps the error "
            f"that it feeds back: {memory} of memory on each rank"
        )
    return place


def _saved(recipe: str, place: Path, previous: Path) -> tuple[Path, Path | None]:
    """Where the recipe stands, and where the one that stood there does. The current folder may be on a full disk."""
    try:
        return place, save(recipe, place, previous=previous)
    except AutoddpError as error:
        other = elsewhere() if place.parent == Path() else None
        if other is None:
            raise
        say(f"warning: {error}; this one goes to {other.recipes}")
        other.make()
        return other.recipes / place.name, save(recipe, other.recipes / place.name, previous=previous)


def _explicit(configuration: Configuration, start: int) -> Configuration:
    """With the step at which PowerSGD begins, which trials leave out because they measure it from their first."""
    if POWERSGD_RANK.of(configuration) is None:
        return configuration
    return configuration.with_values(**{POWERSGD_START_STEP.name: start})


def recipe_of(outcome: Outcome, powersgd_start: int, run: str = "") -> Recipe:
    """The recipe that a study's outcome amounts to.

    `powersgd_start`: reductions before PowerSGD begins. `run`: name of the run's folder.
    """
    facts = outcome.facts
    return Recipe(
        made_by=MadeBy(
            autoddp=__version__,
            torch=facts.torch,
            python=platform.python_version(),
            date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        ),
        fits=Fits(
            world_size=facts.world_size,
            nodes=facts.nodes,
            backend=facts.backend,
            devices=facts.devices,
            torch=facts.torch,
            gradient_bytes=facts.gradient_bytes,
            parameters_digest=facts.parameters_digest,
            links=facts.links,
            networks=facts.networks,
            cuda=facts.cuda,
            nccl=facts.nccl,
        ),
        configuration=_explicit(outcome.decision.configuration.without_variables, powersgd_start),
        env=outcome.decision.configuration.variables,
        evidence=Evidence(
            baseline_ms_per_step=outcome.baseline_seconds * 1e3,
            headroom=outcome.headroom,
            trials=len(outcome.trials),
            final_rounds=len(outcome.baseline_rounds),
            steps=outcome.steps.get("measured", 0),
            why=outcome.decision.why,
            run=run,
            headroom_low=outcome.headroom_interval[0],
            headroom_high=outcome.headroom_interval[1],
        ),
        ladder=tuple(
            LadderEntry(
                rung=standing.rung,
                configuration=_explicit(standing.configuration, powersgd_start),
                ms_per_step=standing.seconds * 1e3,
                speedup=standing.speedup.ratio,
                speedup_low=standing.speedup.low,
                speedup_high=standing.speedup.high,
                gradient_error=standing.error.relative if standing.error else None,
                gradient_error_of_sum=standing.error.of_sum if standing.error else None,
                speedup_low_over=dict(standing.speedup_low_over),
            )
            for standing in outcome.ladder
        ),
    )
