"""The entry point: a command if the first word is one and no such script exists, else a training job.

A training job: understand the command line, find a recipe or make one, launch the job with it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

from autoddp.commandline.environment import job_environment
from autoddp.commandline.mode import Mode, choose, for_hosts
from autoddp.commandline.options import Options
from autoddp.commandline.parsers import help_text
from autoddp.commandline.place import require_master
from autoddp.commandline.project import from_project
from autoddp.commandline.rank_count import set_one
from autoddp.commandline.script import come_back_to, is_command, require_current_folder, require_script, script_digest
from autoddp.commandline.secret_words import without_secrets
from autoddp.commandline.words import parse
from autoddp.errors import AutoddpError
from autoddp.hosts.late_hosts import Running
from autoddp.hosts.together import Hosts
from autoddp.log import OutputLost, get_logger, printable, show, show_exactly, tell, tell_wrapped
from autoddp.network.own_network import Network
from autoddp.processes.signals import signals_end_tuning
from autoddp.processes.silence import awaiting
from autoddp.torchrun.jobs import run_real_job
from autoddp.torchrun.options import ending_signals, load_torchrun, require_job_options, require_rendezvous
from autoddp.torchrun.surroundings import environment_with, waits_told
from autoddp.wire.worker_config import require_injection

if TYPE_CHECKING:
    from autoddp.hosts.agreement import Agreement


logger = get_logger(__name__)


@dataclass(frozen=True)
class Job:
    """A real job, ready to run: the command line, and what the workers get beside torchrun's environment."""

    options: Options
    variables: dict[str, str]
    meeting_point: object = None
    """Keeps the endpoint's store alive until the real job has its own hold on it."""
    waits: bool = False
    """Whether other hosts start the job with this one."""
    joins: bool = False
    """Whether other hosts met before this one came, and run the job."""


def main() -> None:
    """Ends the process. A user's error is one line on stderr and exit code 2; a failed job ends as under torchrun."""
    _open_standard_streams()
    words = sys.argv[1:]
    if "AUTODDP_WRAP" in os.environ:  # autoddp within the command of `autoddp wrap`
        import_module("autoddp.cli.wrap").leave()
    with errors_end_the_process():
        if words and is_command(words[0]):
            sys.exit(import_module(f"autoddp.cli.{words[0]}").run(words[1:]))
        if words and words[0] == "--version":
            from autoddp.version import __version__

            show(f"autoddp {__version__}")
            sys.exit(0)
        if words and words[0] == "--help-all":
            show_exactly(help_text(whole=True))
            sys.exit(0)
    run(lambda: parse(words))


def run(command_line: Callable[[], Options]) -> None:
    """A training job. Returns when it has ended well; ends the process for a user's error."""
    # --budget counts from here, before torch is imported. The age of the process would not do: a shell becomes the last
    # command of `bash -c "pip install … && autoddp …"`, and the process is then as old as all that came before.
    began = time.monotonic()
    with errors_end_the_process():
        require_current_folder()
        with _no_garbage_collection():
            load_torchrun()
        job = prepare(with_project(command_line()), began)
    if job is not None:
        launch(job)


@contextlib.contextmanager
def errors_end_the_process() -> Iterator[None]:
    """A user's error inside is one line on stderr and the error's exit code.

    So is output that cannot be written, and so is Ctrl-C where nothing else heeds it: while torch is being imported.
    """
    try:
        with _without_a_folder():
            yield
    except AutoddpError as error:
        tell(f"error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        tell("SIGINT: ended")
        sys.exit(128 + signal.SIGINT)
    except OutputLost as lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left once more at its end
        if lost.errno == errno.EPIPE:
            sys.exit(128 + signal.SIGPIPE)  # as other programs whose reader has all that it wants
        tell(f"error: standard output cannot be written ({lost.strerror})")
        sys.exit(1)


@contextlib.contextmanager
def _without_a_folder() -> Iterator[None]:
    """A context in which an OSError that comes of a removed current folder becomes a UsageError."""
    try:
        yield
    except OSError:
        require_current_folder()
        raise


def with_project(options: Options) -> Options:
    """The options with what the project's pyproject.toml adds. UsageError for a table there that cannot be used."""
    added, line = from_project(options)
    return replace(options, **added, says=(*options.says, *([line] if line else [])))


def prepare(options: Options, began: float) -> Job | None:
    """Everything up to the real job; None when there is none to run. AutoddpError for what the user has to mend.

    `began`: when the command was given, by `time.monotonic()`.
    """
    if options.no_orphans:  # before anything is started; torch is imported, and has no threads yet
        from autoddp.processes.supervisor import run_below_a_supervisor

        run_below_a_supervisor()
    if options.trials != 0:
        require_injection()
    require_script(options.torchrun)
    for line in options.says:
        tell_wrapped(line)
    with awaiting("the files of the script and its recipes"):
        mode = choose(options)  # where this is an error, nothing has been said of the mode
    require_job_options(options.torchrun)
    if not mode.as_torchrun:
        require_rendezvous(options.torchrun, starts_job=not (options.tune_only or options.dry_run))
        require_master(options.torchrun)
    if mode.ranks:
        tell_wrapped(mode.ranks)
    for line in filter(None, (mode.says, options.elsewhere if mode.tune else "")):
        tell(line)
    if options.dry_run:
        _show(options, mode)
        return None
    try:
        return _decided(options, mode, began)
    except Exception as error:
        # Such as a limit of this user's on memory or threads, which may be enough for the job. Of several hosts one
        # alone must not launch something else.
        is_told = isinstance(error, (AutoddpError, OutputLost))
        if is_told or not mode.tune or mode.several_nodes or options.tune_only:
            raise
        require_current_folder()
        logger.exception("tuning failed")
        tell(f"warning: not tuned, launching as written: tuning itself failed: {error!r}")
        if not options.ranks_given:
            tell(set_one(options.torchrun, is_known=False))
        return Job(options, job_environment(options, mode.as_written, Network()))


def _decided(options: Options, mode: Mode, began: float) -> Job | None:
    """What `prepare` returns, once tuning or the meeting of the hosts, if there is one, has decided it."""
    with contextlib.ExitStack() as until_tuned:
        if mode.tune or _meets(mode):
            says = f"{'tuning ends, ' if mode.tune else ''}no job is started"
            until_tuned.enter_context(signals_end_tuning(ending_signals(options.torchrun), says))
        if mode.tune:
            from autoddp.attempts.preparation import prepared
            from autoddp.attempts.resuming import changed_since
            from autoddp.attempts.starts.objective import ObjectiveTuning
            from autoddp.attempts.tune import Tuning
            from autoddp.cli.tuned import Results  # they take a while

            prepares = until_tuned.enter_context(contextlib.ExitStack())
            preparation = prepares.enter_context(prepared(options))
        if mode.tune or _meets(mode):
            until_tuned.enter_context(awaiting(lambda: "still preparing the job"))
        agreement = _agreement(options, mode)
        network = agreement.network if agreement is not None else Network()
        builds_ddp = True
        if agreement is not None and agreement.joins is not None:
            from autoddp.cli.tuned import joined

            previous = preparation.folder.previous_recipe if mode.tune else None
            mode = joined(options, mode, *agreement.joins, previous)
        elif mode.tune:
            hosts = agreement.hosts if agreement is not None else Hosts()
            here = os.getcwd()
            with hosts.launching(tell, job=not options.tune_only), environment_with(network.variables):
                with Results(options, preparation.folder, network) as results:
                    kind = Tuning if options.study.objective is None else ObjectiveTuning
                    tuning = kind(options, preparation, hosts, results, network.together, began=began)
                    tuned = tuning.run()
                if line := come_back_to(here):
                    tell(line)
                mode, builds_ddp = results.mode(mode, tuned), tuned.built_ddp
                prepares.close()  # before the hosts launch together: a port may be free only in a minute
            if (changed := changed_since(tuning.job)) and not options.tune_only:
                tell(f"warning: changed while it was tuned: {', '.join(changed)}; the job runs what is there now")
        elif agreement is not None:
            before, mode = mode, for_hosts(mode, options, agreement.hosts.nodes, agreement.ranks)
            if mode is not before:
                tell(mode.says)
        if agreement is not None and not options.tune_only:
            agreement.tell_late_hosts(_running(options, mode, agreement, builds_ddp))
        variables = job_environment(options, mode, network)
    joins = agreement is not None and agreement.joins is not None
    waits = mode.several_nodes and not joins  # one too many waits as long as the job takes
    return None if options.tune_only else Job(options, variables, agreement, waits, joins)


def launch(job: Job) -> None:
    """The real job, as torchrun runs it: the same code, the same errors, the same exit codes."""
    from torch.distributed.elastic.multiprocessing.errors import record

    tempfile.tempdir = None  # chosen before tuning, it may be gone by now: torchrun would choose another one
    with environment_with(job.variables), waits_told() if job.waits else contextlib.nullcontext():
        record(run_real_job)(job.options.torchrun, job.joins)


def _meets(mode: Mode) -> bool:
    """Whether the launchers of several hosts meet before the job."""
    return mode.several_nodes and not mode.as_torchrun


def _agreement(options: Options, mode: Mode) -> Agreement | None:
    """On several nodes: make sure that all are about to do the same, and find the network."""
    if not _meets(mode):
        return None
    from autoddp.hosts.agreement import agree

    job = not options.tune_only
    script = script_digest(options.torchrun)
    return agree(options.torchrun, mode.digest(options), mode.reads(options), mode.variables, job=job, script=script)


def _running(options: Options, mode: Mode, agreement: Agreement, builds_ddp: bool) -> Running:
    """What this job is launched with, for hosts that come later."""
    from autoddp.recipe import dump

    return Running(
        digest=mode.digest(options),
        reads=mode.reads(options) if mode.recipe is not None else "the script as written",
        recipe=dump(mode.recipe) if mode.recipe is not None else "",
        chosen=mode.chosen,
        builds_ddp=builds_ddp,
        address=agreement.network.address,
        everywhere=agreement.network.everywhere,
        is_named=agreement.network.is_named,
        nodes=agreement.hosts.left,
    )


def _show(options: Options, mode: Mode) -> None:
    if mode.tune:
        study = options.study
        trials = f"{study.trials} trial{'s' * (study.trials != 1)}"
        what = f"{trials}, up to rung {study.allowed}, then write {options.recipe_path}"
        is_taken = options.recipe is None and os.path.lexists(options.recipe_path)
        other = ", or under the next free number if that is another job's" if is_taken else ""
        show(printable(f"would tune: {what}{other}"))
    variables = " ".join(f"{name}={value!r}" for name, value in mode.variables.items())
    words = [options.script, *without_secrets(options.torchrun.training_script_args)]
    if not options.tune_only:
        show(printable(f"would launch: {variables + ' ' if variables else ''}{' '.join(words)}"))
    show(printable(f"configuration: {'the best one found' if mode.tune else mode.configuration}"))


def _open_standard_streams() -> None:
    """Open those of the three that are closed: else a socket gets their number, and what is printed goes into it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)  # takes the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (open as long as the process)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Importing torch makes a million objects and no garbage: searching them costs a tenth of the launch."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


if __name__ == "__main__":
    main()
