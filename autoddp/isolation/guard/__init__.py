"""Isolation where the host allows no mount namespace: Python's path operations show and change a view of the files.

    start_guard(plan, stop, pipes)

    lock, view               what a path means to the script: the real files, with the script's changes on top, which
                             are kept in the scratch folder
    reading, writing,        Python's own path operations on that view, and
    opening, install         where they replace the original ones
    native, databases,       the same for libraries that open files by path in C, C++ or Rust
    sockets
    shared_memory            what the script shares with other processes, but not with other programs
    audit, programs,         what all this does not cover is stopped before it changes a real file
    libraries

Not promised: a native library that the guard does not know reads the real files, also where the script has changed
them. A file that was opened for reading, and is changed through another descriptor later, keeps its old content in the
first one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NoReturn

from autoddp.isolation import real
from autoddp.isolation.guard.audit import Audit
from autoddp.isolation.guard.databases import Databases
from autoddp.isolation.guard.install import install
from autoddp.isolation.guard.libraries import Libraries
from autoddp.isolation.guard.native import Native
from autoddp.isolation.guard.programs import Programs
from autoddp.isolation.guard.shared_memory import SharedMemory
from autoddp.isolation.guard.sockets import Sockets
from autoddp.isolation.guard.view import View
from autoddp.isolation.locks import IsTheUsers, file_of, watch_locks
from autoddp.isolation.pipes import Pipes
from autoddp.isolation.plan import SHARED_MEMORY, IsolationPlan

__all__ = ["start_guard"]

_started: list[IsolationPlan] = []


def start_guard(plan: IsolationPlan, stop: Callable[[str], NoReturn], pipes: Pipes) -> None:
    """Called once in every Python process of the attempt, before the script's code and before torch is imported.

    A second call in one process does nothing.
    """
    if _started:
        return
    if not os.path.isabs(plan.scratch) or not all(map(os.path.isabs, plan.writable)):
        raise ValueError("the plan's folders must be absolute paths: the script's processes may change their folder")
    _started.append(plan)
    scratch = real.resolved(plan.scratch)
    for folder in (scratch, f"{scratch}/upper", f"{scratch}/aside"):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    view = View(scratch, map(real.resolved, plan.writable), stop)
    native = Native(view)
    programs = Programs(native, plan)
    install(view)
    native.start()
    Databases(native).start()
    Sockets(view).start()
    SharedMemory(view, os.path.join(os.path.dirname(plan.socket), SHARED_MEMORY)).start()
    programs.start()
    watch_locks(functools.partial(_users_file, view))
    os.environ["GIT_OPTIONAL_LOCKS"] = "0"  # git status then leaves the index as it is
    Audit(view, pipes, {**Libraries(plan.landlock, stop).checks, **programs.checks}).start()


def _users_file(view: View, file: int) -> IsTheUsers | None:
    """The user's file of which an open one is the copy."""
    path = real.path_of(file)
    users = view.virtual(path)
    found = real.status_or_none(users) if users != path else None
    return None if found is None else file_of(found)
