"""Isolation where the host allows no mount namespace: Python's path operations follow an overlay kept in the scratch.

    start_guard(plan, stop)

What these operations do not cover is stopped before it changes a real file: see `audit`, `programs` and `libraries`.

Not promised: a native library that the guard does not know reads the real files, also where the script has changed
them; a descriptor that was opened for reading keeps showing the real file after another one has changed its copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

from autoddp.isolation.guard import real
from autoddp.isolation.guard.altering import Altering
from autoddp.isolation.guard.audit import Audit
from autoddp.isolation.guard.changes import Changes
from autoddp.isolation.guard.changing import Changing
from autoddp.isolation.guard.databases import Databases
from autoddp.isolation.guard.imports import Watcher
from autoddp.isolation.guard.install import install
from autoddp.isolation.guard.libraries import Libraries
from autoddp.isolation.guard.loading import Loading
from autoddp.isolation.guard.native import Native
from autoddp.isolation.guard.opening import Opening
from autoddp.isolation.guard.programs import Programs
from autoddp.isolation.guard.reading import Reading
from autoddp.isolation.guard.redirection import Overlay
from autoddp.isolation.guard.sockets import Sockets
from autoddp.isolation.guard.turns import Turns
from autoddp.isolation.plan import IsolationPlan

__all__ = ["start_guard"]

_started: list[IsolationPlan] = []


def start_guard(plan: IsolationPlan, stop: Callable[[str], NoReturn]) -> None:
    """Called once in every Python process of the attempt, before the script's code and before torch is imported.

    A second call in one process does nothing.
    """
    if _started:
        return
    if not os.path.isabs(plan.scratch) or not all(map(os.path.isabs, plan.writable)):
        raise ValueError("the plan's folders must be full paths: processes of the script stand in different folders")
    _started.append(plan)
    scratch = real.realpath(plan.scratch)
    for folder in (scratch, f"{scratch}/upper", f"{scratch}/aside"):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    overlay = Overlay(scratch, map(real.realpath, plan.writable), Turns(scratch))
    changes = Changes(overlay, stop)
    native, libraries = Native(changes), Libraries(plan.landlock, stop)
    programs = Programs(native, plan)
    install(Reading(changes), Changing(changes), Altering(changes), Opening(changes))
    watcher = Watcher()
    native.start(watcher)
    Loading(native).start(watcher)
    Databases(native).start(watcher)
    watcher.when_imported("socket", Sockets(changes).patch)
    programs.start()
    os.environ["GIT_OPTIONAL_LOCKS"] = "0"  # git status then leaves the index as it is
    Audit(changes, {**libraries.checks, **programs.checks}).start()
