"""Ends tuning before the script changes another machine, this machine's settings, or a process that is not its own.

    watch_clients(stop, pipes, by_kernel)      # at the start of every Python process of a tuning attempt

Five checks, from the named to the general:

    clients, storage, filesystems   libraries by name (huggingface_hub, boto3, MLflow, databases, fsspec, …), so that
                                    the reason names them
    requests                        any HTTP request that is not clearly a read, whichever library sends it
    sockets                         what Python sends beneath these libraries: other protocols, and datagrams
    settings                        files of the kernel that hold a setting of this machine
    processes                       signals, and programs that are given a setting or a named pipe of others

No library is imported for this: each is patched when the script imports it, and importing alone never ends tuning.
Not promised: native code within Python that uses the network itself is not seen.

All other programs, which do not check themselves, are watched by the kernel for the keeper: `programs` has both ends,
`system_calls` judges what they do, and `known` and `tools` which of them only read (`aws s3 ls`, `git fetch`). Where
the kernel cannot (`by_kernel` is False), `unwatched` judges them by their words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from autoddp.isolation.elsewhere.clients import CLIENTS
from autoddp.isolation.elsewhere.filesystems import watch_fsspec
from autoddp.isolation.elsewhere.patch import watch
from autoddp.isolation.elsewhere.processes import watch_processes
from autoddp.isolation.elsewhere.requests import REQUESTS
from autoddp.isolation.elsewhere.settings import watch_settings
from autoddp.isolation.elsewhere.sockets import watch_sockets
from autoddp.isolation.elsewhere.storage import STORAGE
from autoddp.isolation.pipes import Pipes

__all__ = ["watch_clients"]


def watch_clients(stop: Callable[[str], NoReturn], pipes: Pipes, by_kernel: bool) -> None:
    """Call `stop` with one plain line before the script changes anything elsewhere. Forked children inherit it."""
    watch((*CLIENTS, *STORAGE, *REQUESTS), stop)
    watch_fsspec(stop)
    watch_sockets(stop)
    watch_processes(stop, pipes, by_kernel)
    watch_settings(stop)
