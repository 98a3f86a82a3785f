"""What the real job's processes get beside torchrun's environment: a recipe's variables, and orders for our worker."""

from __future__ import annotations

import contextlib
import os

from autoddp.commandline.local_fingerprint import not_here
from autoddp.commandline.mode import Mode
from autoddp.commandline.options import Options
from autoddp.commandline.saved_recipes import Note
from autoddp.commandline.watching import watch_plan
from autoddp.knobs import AS_WRITTEN, Rung
from autoddp.knobs.computing import NUMA_BINDING, THREADS
from autoddp.log import tell
from autoddp.network.own_network import VARIABLES, Network
from autoddp.recipe import Recipe
from autoddp.topology.nccl.interface_names import GLOO
from autoddp.torchrun.options import processes_per_node
from autoddp.wire import WorkerConfig, naming_errors
from autoddp.wire.worker_config import near_which

_OF_NUMPY = "OPENBLAS_NUM_THREADS"


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
    live = mode.configuration.without_variables
    # Of a range of hosts some may be lost or come later: then torchrun starts the ranks again, with what is given here.
    is_bound = mode.waits_for_hosts(options) and mode.configuration.rung is not Rung.EXACT and not options.force
    binds = near_which(recipe.fits.devices) if recipe.evidence.objective and NUMA_BINDING.name in live else ""
    config = WorkerConfig(
        binds=binds,
        configuration=AS_WRITTEN if binds else live,
        parameters_digest=recipe.fits.parameters_digest,
        inputs=() if options.force else recipe.fits.inputs,
        backend="" if options.force or not recipe.fits.inputs else recipe.fits.backend,
        static_graph=recipe.fits.find_unused_parameters,
        recipe=str(mode.path or options.recipe_path),
        note=str(note.path.absolute()) if note else "",
        noted=note.begins(options, recipe) if note else "",
        variables=variables,
        world=recipe.fits.world_size if is_bound else 0,
        watch=watch_plan(options, recipe, mode.configuration),
    )
    # Where there is a note to write, also a recipe that launches the script as written needs the worker: it tells
    # whether this is the recipe's job. Another host may have one to write: its ranks wait for the answers of ours.
    ours = (
        config.environment(os.environ)
        if config.configuration or binds or note or variables or mode.several_nodes
        else {}
    )
    return _threads_of_numpy(options, recipe, variables) | variables | ours


def _threads_of_numpy(options: Options, recipe: Recipe, variables: dict[str, str]) -> dict[str, str]:
    """What leaves numpy the one thread that it had in the trials, where the recipe gives torch more.

    Both read OMP_NUM_THREADS when a process starts, and torchrun sets it to 1 for each of several ranks. Trials change
    torch's number alone, in the running process. In the job the workers of data loaders would compute with as many
    threads as a rank, each of them. Without MKL torch may compute by OpenBLAS itself: then nothing is set.
    """
    by_starts = bool(recipe.evidence.objective)  # there each number had a start of its own, for numpy too
    if by_starts or THREADS.variable not in variables or _OF_NUMPY in os.environ:
        return {}
    from torch.backends.mkl import is_available

    return {_OF_NUMPY: "1"} if processes_per_node(options.torchrun) > 1 and is_available() else {}


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
