"""`autoddp [options] train.py …`: find or make a recipe, then launch the job with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoddp.launch.elastic import environment_with, run_real_job
from autoddp.launch.hosts import Hosts
from autoddp.launch.local_fingerprint import not_here
from autoddp.launch.mode import Plan, choose
from autoddp.launch.monitor_interval import watch_plan
from autoddp.launch.network import VARIABLES, Network
from autoddp.launch.options import Request, parse
from autoddp.launch.rank_count import idle_gpus, one_rank, set_ranks
from autoddp.launch.recipes import Note, recipe_may_be_anothers
from autoddp.launch.script import require_script
from autoddp.launch.signals import signals_end_tuning
from autoddp.log import tell
from autoddp.wire import WorkerConfig, naming_errors

if TYPE_CHECKING:
    from autoddp.launch.agreement import Conference


@dataclass(frozen=True)
class Job:
    """A real job, ready to run: the request, and what the workers get beside torchrun's environment."""

    request: Request
    variables: dict[str, str]
    meeting_point: object = None
    """Keeps the endpoint's store alive until the real job has its own hold on it."""


def prepare(words: Sequence[str]) -> Job | None:
    """Everything up to the real job; None when there is none to run. AutoddpError for what the user has to mend."""
    request = parse(words)
    if request.no_orphans:  # before anything is started; torch is imported, and has no threads yet
        from autoddp.launch.supervisor import run_below_a_supervisor

        run_below_a_supervisor()
    require_script(request.torchrun)
    for line in request.says:
        tell(line)
    ranks = ""
    if not request.ranks_given:
        if request.trials == 0:
            ranks = idle_gpus()
        elif recipe_may_be_anothers(request):
            ranks = one_rank()
        else:
            ranks = set_ranks(request.torchrun)
    plan = choose(request)  # where this is an error, nothing has been said before it
    for line in filter(None, (ranks, plan.says, request.elsewhere if plan.tune else "")):
        tell(line)
    if request.dry_run:
        _show(request, plan)
        return None
    with contextlib.ExitStack() as until_tuned:
        if plan.tune:
            from autoddp.cli.tuned import prepared, tuned_plan

            until_tuned.enter_context(signals_end_tuning())
            tuning = until_tuned.enter_context(prepared(request))
        meeting_point, network = _confer(request, plan)
        if plan.tune:
            hosts = meeting_point.hosts if meeting_point is not None else Hosts()
            with environment_with(network.variables):
                plan = tuned_plan(request, plan, tuning, network, hosts)
    variables = {**network.variables, **_variables(request, plan, network)}
    if request.trials != 0:
        variables |= naming_errors(os.environ)
    return None if request.tune_only else Job(request, variables, meeting_point)


def launch(job: Job) -> None:
    """The real job, as torchrun runs it: the same code, the same errors, the same exit codes."""
    from torch.distributed.elastic.multiprocessing.errors import record

    with environment_with(job.variables):
        record(run_real_job)(job.request.torchrun)


def _confer(request: Request, plan: Plan) -> tuple[Conference | None, Network]:
    """On several nodes: make sure that all mean the same, and find the network. The object keeps the meeting open."""
    if not plan.several_nodes or plan.as_torchrun:
        return None, Network()
    from autoddp.launch.agreement import confer

    watched = f"{request.watch} {request.near_limit} {request.lossy_limit}"  # what ranks do must be the same on all
    reads = plan.reads + ("" if request.watch is None else f", --watch {request.watch or 'off'}")
    meeting_point, network = confer(request.torchrun, f"{plan.digest} {watched}", reads, plan.variables)
    if network.says:
        tell(network.says)
    return meeting_point, network


def _variables(request: Request, plan: Plan, network: Network) -> dict[str, str]:
    if plan.bypass:
        return WorkerConfig(bypass=True).environment(os.environ)
    if plan.recipe is None:
        return {}
    variables = _not_set_here(_reachable(plan.variables, network))
    note = Note(plan.path, request) if plan.notes and plan.path is not None else None
    if note:
        with contextlib.suppress(OSError):  # then nothing is noted
            request.folders.make()
    config = WorkerConfig(
        configuration=plan.configuration.without_variables,
        parameters_digest=plan.recipe.fits.parameters_digest,
        inputs=() if request.force else plan.recipe.fits.inputs,
        recipe=str(plan.path or request.recipe_path),
        note=str(note.path.absolute()) if note else "",
        noted=note.begins(request) if note else "",
        variables=variables,
        watch=watch_plan(request, plan.recipe, plan.configuration),
    )
    # A recipe that launches the script as written was made for one job too: for another one it is not the answer.
    return variables | (config.environment(os.environ) if config.configuration or note or variables else {})


def _reachable(variables: dict[str, str], network: Network) -> dict[str, str]:
    """A recipe's variables without a choice of network devices that leads nowhere on this host."""
    unreached = [name for name in variables if name in VARIABLES and not network.has(variables[name])]
    absent = dict.fromkeys(unreached, "not all of these reach all hosts here") | not_here(variables)
    for name, why in absent.items():
        tell(f"the recipe's {name}={variables[name]} is left out: {why}")
    return {name: value for name, value in variables.items() if name not in absent}


def _not_set_here(variables: dict[str, str]) -> dict[str, str]:
    """A recipe's variables without those that the user has set: the user's own values stay."""
    for name in sorted(set(variables) & set(os.environ)):
        if os.environ[name] != variables[name]:
            tell(f"{name}={os.environ[name]} is set here and stays; the recipe has {variables[name]}")
    return {name: value for name, value in variables.items() if name not in os.environ}


def _show(request: Request, plan: Plan) -> None:
    if plan.tune:
        steps = f", up to {plan.accumulate_up_to} steps in one" if plan.accumulate_up_to > 1 else ""
        allowed = f"up to rung {plan.allow.value}{steps}"
        print(f"would tune: {plan.trials} trials, {allowed}, then write {request.recipe_path}")
    variables = " ".join(f"{name}={value!r}" for name, value in plan.variables.items())
    words = [request.script, *request.torchrun.training_script_args]
    print(f"would launch: {variables + ' ' if variables else ''}{' '.join(words)}")
    print(f"configuration: {'the best one found' if plan.tune else plan.configuration}")
