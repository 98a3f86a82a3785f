"""The tuning job: elastic in the main thread, the study in another, and the worker's socket between them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autoddp.knobs import Rung
from autoddp.knobs.threads import THREADS
from autoddp.launch import nccl_logs
from autoddp.launch.elastic import environment_with, run_tuning_job
from autoddp.launch.journal import Journal
from autoddp.launch.live_job import LiveJob
from autoddp.launch.options import DEFAULT_TRIALS, Request
from autoddp.launch.run_folder import RunFolder
from autoddp.launch.screening import Screening
from autoddp.launch.server import WorkerServer
from autoddp.log import get_logger
from autoddp.study import Observer, Outcome, Plan, Study, TrialFailed, TuningOver
from autoddp.worker.order import Order

logger = get_logger(__name__)

_TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
}
"""Experiment trackers, by their own variables: throwaway steps are no experiment."""


@dataclass
class Tuned:
    """What came of tuning. `recipe` is the text that every node writes; "" when there is none, and `why` says why."""

    recipe: str = ""
    outcome: Outcome | None = None
    """The study, here or followed along with the node that led it."""
    why: str = ""
    wall_seconds: dict[str, float] = field(default_factory=dict)


def tune(
    request: Request, folder: RunFolder, observer: Observer, write: Callable[[Outcome], str], interfaces: str = ""
) -> Tuned:
    """Run the study on the live script. `write` makes the recipe's text of an outcome; `interfaces`: see `Order`.

    Never raises for anything the script does; a signal ends it as it would end torchrun.
    """
    began = time.perf_counter()
    server = WorkerServer(folder.socket)
    job = LiveJob(server, Journal(folder.journal))
    tuned = Tuned()
    plan = Plan(
        trials=DEFAULT_TRIALS if request.trials is None else request.trials,
        allow=request.allow or Rung.NEAR,
        accumulate_up_to=request.accumulate_up_to or 1,
        budget=request.budget,
        seed=request.seed,
        limits={Rung.NEAR: request.near_limit, Rung.LOSSY: request.lossy_limit},
    )
    screening = Screening(request.torchrun, folder.path / "screening", dict(os.environ))
    thread = threading.Thread(
        target=_study, args=(job, plan, observer, screening, write, tuned, began), name="autoddp-study", daemon=True
    )
    thread.start()
    try:
        _run_passes(request, folder, job, interfaces)
        thread.join()
    finally:
        screening.stop()
        server.close()
        folder.clean()
    if job.finished is not None:
        tuned.recipe = tuned.recipe or job.finished.recipe
    tuned.wall_seconds["total"] = time.perf_counter() - began
    return tuned


def _run_passes(request: Request, folder: RunFolder, job: LiveJob, interfaces: str) -> None:
    number = 0
    while True:
        scratch = folder.scratch(number)
        wanted = job.pass_begins(scratch / "heartbeats")
        pinned = f"{THREADS.variable} is set" if THREADS.variable in os.environ else ""
        order = Order(
            socket=folder.socket,
            scratch=str(scratch),
            threads_pinned=pinned,
            interfaces=interfaces,
            measured=str(request.output.absolute()),
            accumulates=(request.accumulate_up_to or 1) > 1,
            cuda_graphs=request.cuda_graphs,
            recompiles=request.recompile,
        )
        asked = {"AUTODDP_TUNING": "1", **_TRACKERS_OFF, **nccl_logs.variables(folder.path)}
        with environment_with({**asked, **order.environment(os.environ), **wanted}):
            failure = run_tuning_job(request.torchrun, folder.path, number)
        if not job.pass_ended(failure):
            return
        number += 1


def _study(
    job: LiveJob,
    plan: Plan,
    observer: Observer,
    screening: Screening,
    write: Callable[[Outcome], str],
    tuned: Tuned,
    began: float,
) -> None:
    try:
        facts = job.facts()
        tuned.wall_seconds["start-up"] = time.perf_counter() - began
        tuned.outcome = Study(job, facts, plan, observer, lambda settings: screening(facts, settings)).run()
        tuned.wall_seconds["start-up"] += job.waited
        tuned.recipe = write(tuned.outcome)
        job.finish(tuned.recipe)
    except TuningOver as over:
        tuned.why = str(over)
    except TrialFailed as failed:
        tuned.why = f"the script fails as written: {failed}"
        job.give_up(tuned.why)
    except Exception as error:
        logger.exception("the study failed")
        tuned.why = f"the study itself failed: {error!r}"
        job.give_up(tuned.why)
