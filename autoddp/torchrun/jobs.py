"""Jobs that torch elastic runs: the real one, one for each attempt, and small ones of autoddp's own."""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import sys
from pathlib import Path

from autoddp.log import tell
from autoddp.network.own_network import on_one_host
from autoddp.processes.children import how_ended
from autoddp.torchrun.options import (
    DEFAULT_PORT,
    LOOKS,
    beside_the_meeting_point,
    node_range,
    other_rendezvous,
    rendezvous_errors,
)
from autoddp.torchrun.surroundings import (
    AHEAD,
    FRESH_STORE,
    environment_with,
    follow_clock_as_told,
    for_own_workers,
    number_host,
    quiet_elastic,
    signal_handlers_kept,
)


def run_real_job(torchrun: argparse.Namespace, joins: bool = False) -> None:
    """Run the job with these arguments by torchrun's own code.

    A host that `joins` the others after they have met, or is one too many, may find that the job has ended: then it
    ends with a line, and with the exit code that torchrun has after its traceback.
    """
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError
    from torch.distributed.run import run

    os.environ.pop(AHEAD, None)  # this process follows that clock already
    try:
        run(torchrun)
    except (RendezvousClosedError, RendezvousConnectionError):
        if not joins:
            raise
        tell("error: the other hosts have ended the job, or are out of reach")
        sys.exit(1)


def run_tuning_job(torchrun: argparse.Namespace, folder: Path, number: int) -> str:
    """One attempt: the script's workers with this process's environment. Blocks; "" or why it failed.

    `torchrun.node_rank` is this host's number at the meeting, under any rendezvous.

    Elastic restarts nothing, because each attempt has to begin with the user's files as they are. Elastic's own lines
    go to the attempt's folder, as do the workers' stdout and stderr, one file per rank.
    """
    arguments = beside_the_meeting_point(torchrun, f"tune{number}")
    arguments.standalone = False
    arguments.node_rank = 0
    arguments.master_port = torchrun.master_port or DEFAULT_PORT
    arguments.log_dir = str(folder)
    arguments.redirects, arguments.tee, arguments.local_ranks_filter = "3", "0", ""
    # What else the job logs is the job's alone: a package's logs specs may send it anywhere, and filtered lines go to a
    # file without a limit.
    arguments.logs_specs, arguments.event_log_handler = None, "null"
    arguments.duplicate_stdout_filters, arguments.duplicate_stderr_filters = [], []
    # Elastic sleeps so long before it looks at its ranks. An attempt whose ranks have ended is killed after 20 seconds,
    # and of one that elastic has not looked at nobody learns that a rank has failed.
    arguments.monitor_interval = min(arguments.monitor_interval, LOOKS)
    is_several = node_range(torchrun)[1] > 1
    fresh = FRESH_STORE if is_several and _agents_share_one_store() else {}
    follow_clock_as_told()
    if is_several:
        number_host(torchrun.node_rank)
    with quiet_elastic(folder / "elastic.log"), environment_with(fresh):
        return _run_without_restarts(arguments)


_KILLED = {*signal.valid_signals()} - {signal.SIGTERM, signal.SIGABRT}
"""Signals that end a rank which has not failed before. By SIGTERM elastic ends those that are left, and by SIGABRT a
rank may end on gloo at its exit."""


def _run_without_restarts(arguments: argparse.Namespace) -> str:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    arguments.max_restarts = 0
    config, command, words = config_from_args(arguments)
    try:
        elastic_launch(config=config, entrypoint=command)(*words)
    except ChildFailedError as error:
        # A rank that was killed, and those that have lost it, may be seen to fail at the same look.
        killed = [one for one in error.failures.items() if -one[1].exitcode in _KILLED]
        rank, failure = killed[0] if killed else error.get_first_failure()
        return f"rank {rank} {how_ended(failure.exitcode)}"
    return ""


def _agents_share_one_store() -> bool:
    """Whether the workers on several hosts get the store in which the agents meet, as in older versions of torch.

    There a rank may find the address at which another rank listened in the attempt before. In newer versions each start
    has a store of its own for the workers, which scripts may use before they make a process group.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

    return "server_port" not in inspect.signature(RendezvousStoreInfo.build).parameters


def run_own_job(torchrun: argparse.Namespace, name: str, more: dict[str, str]) -> str:
    """A job of ours on the user's hosts, without restarts, with the variables `more`. Blocks; "" or why it failed.

    The workers' output goes where the user's options send it. UsageError for hosts that cannot meet; a signal ends this
    process as it would have ended the job.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    arguments = other_rendezvous(torchrun, name)
    arguments.monitor_interval = min(arguments.monitor_interval, LOOKS)  # else it ends so much later
    variables = for_own_workers(os.environ) | more
    if node_range(torchrun)[1] == 1:
        variables |= on_one_host(os.environ)
    with quiet_elastic(None), signal_handlers_kept(), environment_with(variables):
        try:
            with rendezvous_errors(arguments):
                return _run_without_restarts(arguments)
        except SignalException as error:
            raise SystemExit(128 + error.sigval) from None  # the exit code that shells give


def be_torchrun() -> None:
    """Run torchrun with this process's command line, which has the words of `meeting_words`; see `own_torchrun`.

    Where the launcher is killed, this process ends its ranks and itself: the keeper knows only attempts.
    """
    if sys.platform == "linux":
        from autoddp.isolation.kernel.syscalls import die_with_parent, leave_no_core_files

        # Elastic ends the ranks then; until it is imported there are none.
        die_with_parent(signal.SIGTERM, os.getppid())
        leave_no_core_files()  # NCCL's watchdog aborts a rank under a setting that hangs, in the user's folder
    for name in [one for one in os.environ if one.startswith("PET_")]:
        del os.environ[name]  # torchrun's options for the user's job: `meeting_words` has what is this job's too
    from torch.distributed.run import main

    from autoddp.network import loopback

    loopback.register()
    follow_clock_as_told()
    main()
