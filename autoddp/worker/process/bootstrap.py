"""Starts the worker: once the script imports torch, and only then, DistributedDataParallel is patched in place."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import wrapt

from autoddp.imports import past_the_script
from autoddp.wire import LauncherClient, WorkerConfig
from autoddp.wire.recorded_calls import RecordingPlan
from autoddp.wire.started_with import keep, started_with
from autoddp.worker.process.gloo_threads import destroy_groups_at_rest


def arm(text: str, began: Mapping[str, str]) -> None:
    """`text` is that of a `WorkerConfig`, or "" in a job that runs as written. Imports no torch itself.

    `began`: the environment when this process began, which the script may have changed since.
    """
    keep(began)
    config = WorkerConfig.parse(text or "{}")
    if not config.socket:
        _when_torch_is_imported(destroy_groups_at_rest)
    if not text:
        return
    if config.binds:
        binding = "autoddp.worker.effects.binding"
        _when_torch_is_imported(lambda: importlib.import_module(binding).bind_without_a_model(config.binds))
    if config.socket:
        _arm_for_tuning(config, began.get("OMP_NUM_THREADS") or None)
    elif config.bypass:
        _when_torch_is_imported(lambda: importlib.import_module("autoddp.worker.job.bypass").start_bypassing())
    else:
        _when_torch_is_imported(lambda: importlib.import_module("autoddp.worker.job.applying").start_applying(config))


def arm_recording(text: str, is_launched: bool) -> None:
    """Record the collectives of this process from its first one on. `text` is that of a `RecordingPlan`.

    The processes that a script starts are recorded too: they may be its ranks. Imports no torch itself.
    """
    plan = RecordingPlan.parse(text)

    def start() -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        from autoddp.worker.observe.call_recorder import CallRecorder
        from autoddp.worker.observe.collectives import collectives
        from autoddp.worker.process.agent_store import agents_store_is_at

        agents_store_is_at(plan.port)
        recorder = CallRecorder(plan, is_launched)
        collectives.record(recorder)
        register_optimizer_step_pre_hook(recorder.steps)
        register_optimizer_step_post_hook(recorder.stepped)

    _when_torch_is_imported(start)


def _arm_for_tuning(config: WorkerConfig, threads_given: str | None) -> None:
    from autoddp.worker.process.ending import leave, watch_the_end
    from autoddp.worker.process.heartbeat import note_this_process, start_heartbeat

    launcher = LauncherClient(config.socket)
    # Elastic starts a group again when a host comes or goes; what happened may have ended the tuning.
    if int(started_with("TORCHELASTIC_RESTART_COUNT", "0")) and not launcher.hello():
        leave()
    watch_the_end(launcher)
    folder = os.path.join(config.scratch, "heartbeats")
    note_this_process(folder)
    if started_with("RANK", ""):
        start_heartbeat(folder)
    else:  # under --run-path elastic tells it a moment after it has imported torch
        _when_torch_is_imported(lambda: start_heartbeat(folder))
    is_written = notice_writes("OMP_NUM_THREADS")

    def start() -> None:
        tuning = importlib.import_module("autoddp.worker.trial.tuning")
        tuning.start_tuning(config, launcher, "" if is_written() else threads_given)

    _when_torch_is_imported(start)


written: set[str] = set()
"""Variables that the script has written, of those that `notice_writes` was called for."""


def notice_writes(variable: str) -> Callable[[], bool]:
    """Notice from here on whether the script writes this variable, also the value that it has, until that is asked."""
    environment: Any = type(os.environ)
    write = environment.__setitem__

    @functools.wraps(write)
    def noticing(self: Any, name: str, value: str) -> None:
        if name == variable:
            written.add(name)
        write(self, name, value)

    def is_written() -> bool:
        if environment.__setitem__ is noticing:  # else somebody has wrapped it since
            environment.__setitem__ = write
        return variable in written

    environment.__setitem__ = noticing
    return is_written


def _when_torch_is_imported(then: Callable[[], None]) -> None:
    def imported(torch: ModuleType) -> None:
        if torch.distributed.is_available():
            with past_the_script():
                then()

    wrapt.register_post_import_hook(imported, "torch")
