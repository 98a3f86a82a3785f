"""What the real job's processes get beside torchrun's environment: a recipe's variables, and orders for our worker."""

from __future__ import annotations

import contextlib
import math
import os

from autoddp.commandline.local_fingerprint import not_here
from autoddp.commandline.mode import Mode
from autoddp.commandline.options import Options
from autoddp.commandline.saved_recipes import Note
from autoddp.knobs import Configuration
from autoddp.knobs.hook import DEFAULT_START_STEP, POWERSGD_RANK, POWERSGD_START_STEP
from autoddp.log import tell
from autoddp.network.own_network import VARIABLES, Network
from autoddp.recipe import Recipe
from autoddp.topology.nccl.interface_names import GLOO
from autoddp.wire import WatchPlan, WorkerConfig, naming_errors

_COST = 0.005  # share of the job's time that measuring the gradient error may take
_STEPS_WITH_FEEDBACK = 4  # reductions compared each time, else one: what error feedback sends later shows over several
_SOON = 50  # reductions after the hook begins: the first look is not later, so that an early error is found early


def job_environment(options: Options, mode: Mode, network: Network) -> dict[str, str]:
    """The variables for a launch. The user is told which ones of the recipe's are left out."""
    found = dict(network.variables)
    if mode.bypass:
        found |= WorkerConfig(bypass=True).environment(os.environ)
    elif mode.recipe is not None:
        found |= _of_recipe(options, mode, mode.recipe, network)
    elif mode.own_ranks:  # without it they mostly wait for a store that nobody makes
        found |= _not_set_here(mode.variables)
    return found if options.trials == 0 else found | naming_errors(os.environ)


def _of_recipe(options: Options, mode: Mode, recipe: Recipe, network: Network) -> dict[str, str]:
    variables = _not_set_here(_reachable(mode.variables, network))
    note = Note(mode.path, options) if mode.notes and mode.path is not None else None
    if note:
        with contextlib.suppress(OSError):  # then nothing is noted
            options.folders.make()
    config = WorkerConfig(
        configuration=mode.configuration.without_variables,
        parameters_digest=recipe.fits.parameters_digest,
        inputs=() if options.force else recipe.fits.inputs,
        recipe=str(mode.path or options.recipe_path),
        note=str(note.path.absolute()) if note else "",
        noted=note.begins(options) if note else "",
        variables=variables,
        watch=watch_plan(options, recipe, mode.configuration),
    )
    # Where there is a note to write, also a recipe that launches the script as written needs the worker: it tells
    # whether this is the recipe's job.
    return variables | (config.environment(os.environ) if config.configuration or note or variables else {})


def _reachable(variables: dict[str, str], network: Network) -> dict[str, str]:
    """A recipe's variables without a choice of network devices that leads nowhere on this host."""
    unreached = [name for name in variables if name in VARIABLES and not network.has(variables[name])]
    absent = dict.fromkeys(unreached, "not all of these reach all hosts here") | not_here(variables)
    everywhere = None if network.everywhere is None else set(network.everywhere)
    if GLOO in variables and GLOO not in os.environ:  # what the user has set there stays
        if network.is_named:
            absent[GLOO] = "it is set on a host of the job, and Gloo wants as many interfaces on every one"
        elif everywhere is not None and not set(variables[GLOO].split(",")) <= everywhere:  # decided alike on all
            absent[GLOO] = "not every host is reached by all of these, and Gloo wants as many interfaces on every one"
    for name, why in absent.items():
        tell(f"the recipe's {name}={variables[name]} is left out: {why}")
    return {name: value for name, value in variables.items() if name not in absent}


def _not_set_here(variables: dict[str, str]) -> dict[str, str]:
    """A recipe's variables without those that the user has set: the user's own values stay."""
    for name in sorted(set(variables) & set(os.environ)):
        if os.environ[name] != variables[name]:
            tell(f"{name}={os.environ[name]} is set here and stays; the recipe has {variables[name]}")
    return {name: value for name, value in variables.items() if name not in os.environ}


def watch_plan(options: Options, recipe: Recipe, configuration: Configuration) -> WatchPlan | None:
    """When the real job measures its hook's gradient error: as often as half a percent of its time allows.

    None where the hook is exact, or under `--watch off`.
    """
    rung = configuration.gradient_rung
    limit = options.study.limits.get(rung)
    if options.watch == 0 or limit is None or not configuration.hook:
        return None
    compared = _STEPS_WITH_FEEDBACK if rung.has_error_feedback else 1
    # A reduction that is compared costs one exact reduction more: at most what the baseline's step takes.
    entry = next((e for e in recipe.ladder if e.rung is rung), None)
    baseline, launched = recipe.evidence.baseline_ms_per_step, entry.ms_per_step if entry else None
    ratio = baseline / launched if baseline and launched else 1.0
    every = options.watch or math.ceil(compared * max(1.0, ratio) / _COST)
    exact_first = 0
    if POWERSGD_RANK.of(configuration):
        begins = POWERSGD_START_STEP.of(configuration)
        exact_first = DEFAULT_START_STEP if begins is None else begins
    return WatchPlan(rung, limit, exact_first + min(every, _SOON), every, compared)
