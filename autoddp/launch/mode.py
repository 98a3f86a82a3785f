"""What a command line amounts to: launch as torchrun would, launch with a recipe, or tune first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autoddp.errors import NotTuned, RecipeError, UnfitRecipe, UsageError
from autoddp.knobs import AS_WRITTEN, KNOBS, Configuration, Rung
from autoddp.knobs.micro_batches import larger_batch
from autoddp.launch.elastic import node_range, processes_per_node
from autoddp.launch.local_fingerprint import known_here, not_here
from autoddp.launch.options import DEFAULT_TRIALS, Request
from autoddp.launch.recipes import Note, best_of, found_recipes, script_names
from autoddp.launch.script import is_read_once
from autoddp.recipe import LadderEntry, Recipe, best_allowed, differences, load, require_fit


@dataclass(frozen=True)
class Plan:
    """What is about to be done."""

    tune: bool
    recipe: Recipe | None
    several_nodes: bool
    trials: int = DEFAULT_TRIALS
    allow: Rung = Rung.NEAR
    accumulate_up_to: int = 1
    cuda_graphs: bool = False
    recompile: bool = False
    chosen: tuple[Rung, int] | None = None
    """The rung and the steps in one that are asked for of a saved recipe; None: what the recipe launches."""
    bypass: bool = False
    """A world of one, in which DDP has nothing to reduce."""
    says: str = ""
    """One line for the user."""
    path: Path | None = None
    """Where the recipe stands."""
    notes: bool = False
    """Whether a job that turns out not to be the recipe's is noted, so that the next launch tunes again."""

    @property
    def as_torchrun(self) -> bool:
        """Nothing but torchrun."""
        return not self.tune and self.recipe is None and not self.bypass

    @property
    def configuration(self) -> Configuration:
        """What the workers will be given."""
        if self.recipe is None:
            return AS_WRITTEN
        return self.recipe.configuration if self.chosen is None else _of_ladder(self.recipe, *self.chosen)

    @property
    def variables(self) -> dict[str, str]:
        """What the workers' environment gets: the recipe's, or another rung's in the place of what was launched."""
        if self.recipe is None:
            return {}
        if self.configuration == self.recipe.configuration:
            return self.recipe.env | self.configuration.variables
        knobs = {knob.variable for knob in KNOBS}
        others = {name: value for name, value in self.recipe.env.items() if name not in knobs}
        return others | self.configuration.variables

    @property
    def digest(self) -> str:
        """Equal on two nodes if they are about to do the same."""
        if self.recipe is None:
            asked = f"{self.trials} {self.allow.value} {self.accumulate_up_to} {self.cuda_graphs} {self.recompile}"
            return f"tune {asked}" if self.tune else "torchrun"
        return f"launch {self.configuration!r} {sorted(self.variables.items())}"

    @property
    def reads(self) -> str:
        """The plan in a few words."""
        if self.recipe is None:
            return f"no recipe, tuning with {self.trials} trials" if self.tune else "no recipe"
        return f"a recipe with {self.configuration}"


def _of_ladder(recipe: Recipe, rung: Rung, accumulate_up_to: int) -> Configuration:
    """What a study would have launched for a user who allows this; what was written by hand stays, if it is allowed."""
    stays = recipe.configuration.allowed_by(rung, accumulate_up_to)
    launched = next((entry for entry in recipe.ladder if _launches(recipe, entry)), None)
    if stays and recipe.configuration and launched is None:
        return recipe.configuration
    ladder = [_with_its_decision(entry, recipe) if entry is launched else entry for entry in recipe.ladder]
    best = best_allowed(ladder, rung, accumulate_up_to)
    return best.configuration if best else AS_WRITTEN


def _launches(recipe: Recipe, entry: LadderEntry) -> bool:
    """Whether this entry is what the recipe launches. Variables stand in [env], and not under [configuration]."""
    variables = entry.configuration.variables.items()
    return entry.configuration.without_variables == recipe.configuration and variables <= recipe.env.items()


def _with_its_decision(launched: LadderEntry, recipe: Recipe) -> LadderEntry:
    """The same with what a recipe of an older version leaves out: its study has found it worth it over milder rungs.

    Only over those that its study must have allowed, since they change no more than what it launches.
    """
    rung, steps = launched.configuration.gradient_rung, launched.configuration.steps_per_update
    others = [entry.configuration for entry in recipe.ladder if entry is not launched]
    beaten = {c.rung: math.inf for c in others if c.allowed_by(rung, steps) and c.rung.order < launched.rung.order}
    return replace(launched, speedup_low_over=beaten | launched.speedup_low_over)


def choose(request: Request) -> Plan:
    """The plan for a request. AutoddpError for a recipe that cannot be used."""
    plan = _chosen_plan(request)
    if not plan.tune or not is_read_once(request.torchrun):
        return plan
    why = f"{request.script} is no regular file, so it can be read only once"
    if request.tune_only:
        raise NotTuned(f"{why}: nothing was tuned; copy it into a file")
    return Plan(False, None, plan.several_nodes, says=f"{why}: launching as torchrun would, without tuning")


def _chosen_plan(request: Request) -> Plan:
    try:
        fewest, most = node_range(request.torchrun)
        world = fewest * processes_per_node(request.torchrun)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{error}; see --nnodes and --nproc-per-node in autoddp --help") from None
    _require_ranks(request, fewest, most, world)
    several = most > 1
    known: dict[str, object] = {"torch": torch_version()}
    if fewest == most:
        known |= {"world_size": world, "nodes": fewest}
    plan = Plan(
        tune=True,
        recipe=None,
        several_nodes=several,
        trials=DEFAULT_TRIALS if request.trials is None else request.trials,
        allow=request.allow or Rung.NEAR,
        accumulate_up_to=request.accumulate_up_to or 1,
        cuda_graphs=request.cuda_graphs,
        recompile=request.recompile,
    )
    if request.trials is None and request.recipe is not None:
        return _with_given_recipe(request, plan, known)
    if request.trials == 0:
        if request.tune_only:
            raise UsageError("--tune-only --trials 0: nothing would be done; allow trials, e.g. --trials 20")
        return Plan(tune=False, recipe=None, several_nodes=several)
    if world == 1 and not several and request.tune_only:
        raise NotTuned("nothing to tune in a world of one; start two ranks or more, e.g. --nproc-per-node 2")
    if world == 1 and not several:
        says = "nothing to tune in a world of one: launching as torchrun would, without DDP's reduction (exact)"
        return Plan(False, None, several, bypass=True, says=says)
    found = found_recipes(request) if request.trials is None else []
    return _with_found_recipe(request, plan, known, found) if found else plan


def _require_ranks(request: Request, fewest: int, most: int, world: int) -> None:
    """UsageError for numbers with which no job can start, or would wait in vain."""
    torchrun = request.torchrun
    if not 1 <= fewest <= most:
        raise UsageError(f"--nnodes {torchrun.nnodes}: must be 1 or more, or a range such as 1:4")
    if world < 1:
        raise UsageError(f"--nproc-per-node {torchrun.nproc_per_node}: must be 1 or more, e.g. --nproc-per-node 2")
    if torchrun.rdzv_backend == "static" and not 0 <= torchrun.node_rank < most:
        raise UsageError(f"--node-rank {torchrun.node_rank}: must be from 0 to {most - 1} with --nnodes {most}")


def _with_given_recipe(request: Request, plan: Plan, known: dict[str, object]) -> Plan:
    assert request.recipe is not None
    if request.recipe.is_dir():
        return _with_fitting_recipe(request, request.recipe, plan, known)
    recipe = load(request.recipe)
    launching = _launching(plan, request.recipe, recipe, request)
    # A recipe that was copied, or is used for a script that was moved: who names it means it, and the worker looks on.
    elsewhere = differences(recipe.fits, script=script_names(request))
    if not request.force:
        here = {**known, **known_here(recipe.fits)}
        if differences(recipe.fits, **here):
            require_fit(recipe, request.recipe, **here, script=script_names(request))
        absent = _absent(launching)
        if absent:
            fix = "correct [env], tune again with --trials 20, or leave it out with --force"
            raise UnfitRecipe(f"{request.recipe}: {'; '.join(absent)}: {fix}")
    if elsewhere:
        return replace(launching, says=f"{launching.says} ({elsewhere[0]}; parameters and inputs are compared)")
    return launching


def _absent(plan: Plan) -> list[str]:
    """Network devices of the recipe that are not here. Of several hosts each leaves out its own."""
    if plan.several_nodes:
        return []
    return [f"env.{name} = {plan.variables[name]!r}: {why}" for name, why in not_here(plan.variables).items()]


def _with_fitting_recipe(request: Request, folder: Path, plan: Plan, known: dict[str, object]) -> Plan:
    """The one recipe of a folder that fits; why the others do not is said, also where there is none or several."""
    fitting, others = [], []
    for path in sorted(folder.glob("*.toml")):
        try:
            recipe = load(path)
            unlike = differences(recipe.fits, **known, **known_here(recipe.fits))
            unlike += _absent(_launching(plan, path, recipe, request))
        except RecipeError as problem:
            unlike = [str(problem)]
        if unlike:
            others.append(f"{path.name}: {'; '.join(unlike)}")
        else:
            fitting.append((path, recipe))
    if len(fitting) != 1:
        found = (
            f"{len(fitting)} of its recipes fit ({', '.join(path.name for path, _ in fitting)})"
            if fitting
            else (f"none of its recipes fits ({' | '.join(others)})" if others else "no recipe in it")
        )
        raise UnfitRecipe(f"--recipe {folder}: {found}: name one file, or tune with --trials 20")
    path, recipe = fitting[0]
    says = f"recipe {path}: launching {recipe.configuration}{larger_batch(recipe.configuration.steps_per_update)}"
    says += "".join(f"; not {other}" for other in others)
    return replace(_launching(plan, path, recipe, request), says=says)


def _with_found_recipe(request: Request, plan: Plan, known: dict[str, object], paths: Sequence[Path]) -> Plan:
    """The one of the script's recipes that fits, as far as that can be known before the start; else tuning."""
    names, others = script_names(request), []
    fitting: list[tuple[Path, Recipe]] = []
    unfit: list[tuple[Path, Recipe]] = []
    for path in paths:
        recipe = load(path)
        elsewhere = differences(recipe.fits, script=names)
        unlike = elsewhere + differences(recipe.fits, **known, **known_here(recipe.fits))
        unlike += _absent(_launching(plan, path, recipe, request))
        if unlike:
            others.append(f"{path} does not fit ({'; '.join(unlike)})")
        if not elsewhere:
            (unfit if unlike else fitting).append((path, recipe))
    usable = fitting or (unfit if request.force else [])
    if not usable:
        return replace(plan, says=f"{'; '.join(others)}: tuning again")
    path, recipe = best_of(usable, request)
    why = "" if request.force else Note(path, request).why(recipe, request)
    if why:
        return replace(plan, says=f"the last launch with {path} was of another job ({why}): tuning again")
    return replace(_launching(plan, path, recipe, request), notes=not request.force)


def _launching(plan: Plan, path: Path, recipe: Recipe, request: Request) -> Plan:
    chosen = _chosen(request, recipe.configuration)
    found = replace(plan, tune=False, recipe=recipe, path=path, chosen=chosen)
    means = larger_batch(found.configuration.steps_per_update)
    return replace(found, says=f"recipe {path}: launching {found.configuration}{means}")


def _chosen(request: Request, launched: Configuration) -> tuple[Rung, int] | None:
    """What is not asked for is as in the configuration that the recipe launches."""
    if request.allow is None and request.accumulate_up_to is None:
        return None
    return request.allow or launched.gradient_rung, request.accumulate_up_to or launched.steps_per_update


def torch_version() -> str:
    """Without what follows a `+`: the build."""
    from torch import __version__

    return str(__version__).split("+")[0]
