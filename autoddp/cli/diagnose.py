"""`autoddp diagnose [options] train.py`: why the job is slow, by experiments on the running script."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import replace

from autoddp.attempts.job.machine import NO_DDP, TOO_SHORT
from autoddp.attempts.preparation import prepared
from autoddp.attempts.tune import Tuned, Tuning
from autoddp.cli.tuned import Results
from autoddp.codec import finite
from autoddp.commandline.mode import Mode, choose_to_diagnose
from autoddp.commandline.options import Options
from autoddp.commandline.parsers import help_text
from autoddp.commandline.place import require_master
from autoddp.commandline.script import require_current_folder, require_script, script_digest
from autoddp.commandline.secret_words import without_secrets
from autoddp.commandline.words import parse_with_switch
from autoddp.diagnose import NOTHING
from autoddp.errors import NotTuned, UsageError
from autoddp.hosts.agreement import agree
from autoddp.hosts.together import Hosts
from autoddp.log import WIDTH, printable, show, show_exactly, show_json, tell, tell_wrapped
from autoddp.network.own_network import Network
from autoddp.processes.signals import Interrupted, signals_end_tuning
from autoddp.processes.silence import awaiting
from autoddp.report import communication_text
from autoddp.report.diagnosis_text import for_stdout
from autoddp.tables import text_of, width_of_stdout
from autoddp.torchrun.options import ending_signals, load_torchrun, require_job_options, require_rendezvous
from autoddp.torchrun.surroundings import environment_with
from autoddp.wire.worker_config import require_injection

_HELP = """\
usage: autoddp diagnose [--json] [options] train.py [its arguments]

Find out why a training job is slow. The unmodified script runs as in tuning, so
your files stay as they are. The times of each rank's stages (data, forward,
backward and others) make causes suspicious. Experiments on the running script
prove them: it is given copies of earlier batches in place of the data loader,
it leaves out the reduction of gradients, or one rank is delayed. Nothing is
tuned, and no job is launched afterwards.

  --json                  print one JSON document instead of tables
  --diagnose-budget TIME  time for measuring (90s of steps)
  --budget TIME           limit of the time from the command on (15m)
"""
_OWN_RANKS = (
    "no collective was seen. The script starts its own ranks, and what these do with DDP is seen only in ranks that "
    "autoddp starts: let the script take its rank from the environment, as under torchrun"
)


def run(arguments: list[str]) -> int:
    """The exit code of `autoddp diagnose` with these arguments; AutoddpError for what the user has to mend.

    On several hosts give the same command on each; each prints the same.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        show_exactly(f"{_HELP}\n{help_text(whole=True, of_diagnose=True).partition(chr(10) * 2)[2]}")
        return 0
    began = time.monotonic()  # see `main.run`
    require_current_folder()
    load_torchrun()
    examine(*parse_with_switch(arguments, "--json"), began)
    return 0


def examine(options: Options, as_json: bool, began: float | None = None) -> None:
    """Diagnose this job and print what was found; AutoddpError as for `run`. `began`: when the command was given."""
    began = time.monotonic() if began is None else began
    if as_json and options.dry_run:
        raise UsageError("diagnose: --dry-run prints a line of text: leave out --json")
    if options.no_orphans:  # before anything is started; torch is imported, and has no threads yet
        from autoddp.processes.supervisor import run_below_a_supervisor

        run_below_a_supervisor()
    options = replace(options, diagnose_only=True, tune_only=True)
    require_injection()
    require_script(options.torchrun)
    for line in options.says:
        tell_wrapped(line)
    with awaiting("the files of the script and its recipes"):
        mode = choose_to_diagnose(options)
    require_job_options(options.torchrun)
    options = replace(options, trials=None, recipe=None)  # those of variables are for tuning and launching
    if mode.ranks:
        tell_wrapped(mode.ranks)
    if mode.says:
        tell(mode.says)
    if options.dry_run:
        words = [options.script, *without_secrets(options.torchrun.training_script_args)]
        show(printable(f"would diagnose: {' '.join(words)}"))
        return
    tuning, tuned, see = _examined(options, mode, began)
    try:
        _show(tuning, tuned, see, as_json)
    except NotTuned as error:
        if not tuning.deadline.ended:
            raise
        tell(str(error))
    if tuning.deadline.ended:
        raise Interrupted(signal.SIGINT)


def _show(tuning: Tuning, tuned: Tuned, see: str, as_json: bool) -> None:
    """Print the answer; NotTuned where there is none, or only a part of it."""
    communication, rows = tuning.communication, tuning.own_collectives
    if tuned.diagnosis is None and communication is not None:
        if as_json:
            show_json(finite(communication.document()))
        else:
            show(text_of(communication_text.for_stdout(communication), _columns()))
        if tuned.why not in (NO_DDP, TOO_SHORT):
            raise NotTuned(f"the diagnosis ended early: {tuned.why}{see}")
    elif tuned.diagnosis is None:
        why = tuned.why or "the leading host gave up"
        if as_json:  # a program that reads the answer finds the reason in it
            show_json(NOTHING | {"not_measured": [f"everything: {why}"]})
        if why not in (NO_DDP, TOO_SHORT):
            needs = "; a script that starts its own ranks needs --nproc-per-node 1" if tuning.joining > 1 else ""
            raise NotTuned(f"nothing was diagnosed: {why}{needs}{see}")
        if not as_json:
            unseen = ", and no collective of its own was seen (functional ones are not)" if why == NO_DDP else ""
            show(f"nothing to measure: {_OWN_RANKS if unseen and tuning.joining else f'{why}{unseen}'}")
    elif as_json:
        show_json(finite(tuned.diagnosis.plain() | {"communication": {"rows": [row.plain() for row in rows]}}))
    else:
        own = [communication_text.rows(rows)] if rows else []
        show(text_of([*for_stdout(tuned.diagnosis), *own], _columns()))


def _columns() -> int:
    """Columns for the tables: in fewer rich cuts their numbers, and a terminal breaks longer lines by itself."""
    return max(WIDTH, width_of_stdout())


def _examined(options: Options, mode: Mode, began: float) -> tuple[Tuning, Tuned, str]:
    """The job, what came of it, and where its logs are, see `RunFolder.see`."""
    running: list[Tuning] = []

    def ends_early(number: int) -> bool:
        """By Ctrl-C a diagnosis on one host ends as by `--budget`, with the answer that there is by then."""
        if number != signal.SIGINT or not running:
            return False
        running[0].deadline.ended = "ended by Ctrl-C"
        return True

    with contextlib.ExitStack() as until_done:
        ending = ending_signals(options.torchrun)
        until_done.enter_context(signals_end_tuning(ending, "the diagnosis ends", ends_early))
        preparation = until_done.enter_context(prepared(options))
        until_done.enter_context(awaiting("the end of the diagnosis"))
        agreement = None
        if mode.several_nodes:
            require_rendezvous(options.torchrun)
            require_master(options.torchrun)
            plan, script = (mode.digest(options), mode.reads(options)), script_digest(options.torchrun)
            agreement = agree(options.torchrun, *plan, mode.variables, measures=True, script=script)
        network = agreement.network if agreement is not None else Network()
        hosts = agreement.hosts if agreement is not None else Hosts()
        with environment_with(network.variables), Results(options, preparation.folder, network) as results:
            tuning = Tuning(options, preparation, hosts, results, network.together, network.rates, began)
            running += [tuning] if not hosts.several else []
            tuned = tuning.run()
        results.keep_diagnosis(tuned, tuning.communication)
    return tuning, tuned, preparation.folder.see
