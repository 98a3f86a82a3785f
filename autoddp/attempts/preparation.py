"""What tuning needs before it begins: the run's folder, the keeper, the isolation, and a place for the recipe.

with prepared(options) as preparation:
    …                       # at its end the ports that the script has taken are free again for the job
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autoddp.attempts.isolating import Isolation, choose_isolation
from autoddp.attempts.keeper import Keeper
from autoddp.commandline.options import Options
from autoddp.errors import UsageError
from autoddp.isolation.ports import noted_ports, ports_kept
from autoddp.log import tell
from autoddp.processes.polling import polls
from autoddp.processes.silence import awaiting
from autoddp.recipe import require_replaceable
from autoddp.runs.folder import RunFolder, temporary_folder
from autoddp.runs.latest import point_to
from autoddp.runs.usual_folders import OUTPUT, elsewhere

_PORT_IS_KEPT = 62.0  # seconds; Linux keeps a port for 60 after the last connection to it
_FIRST_WORD = 2.0  # seconds of waiting for it until a line says so
_LOOKS = 1.0  # seconds between two looks at it


@dataclass(frozen=True)
class Preparation:
    """What is made before tuning begins."""

    folder: RunFolder
    keeper: Keeper
    isolation: Isolation
    """The best that this host has, of what was asked for."""


@contextlib.contextmanager
def prepared(options: Options) -> Iterator[Preparation]:
    """What tuning needs: made before any thread is started, because it forks, and removed whatever happens.

    UsageError where there is no place for the recipe or for the run's folder.
    """
    with awaiting("what earlier runs have left to be removed"):  # a script may have written a million files
        temporary_folder()
        if not options.diagnose_only:
            _require_place_for_recipe(options)
        folder = _run_folder(options)
    for line in folder.says:
        tell(line)
    keeper, ports = Keeper(), set[int]()
    keeper.removes([str(folder.sockets)])
    try:
        yield Preparation(folder, keeper, choose_isolation(options, folder, keeper))
        if not (options.tune_only or options.diagnose_only):
            ports = noted_ports(str(folder.sockets))  # the keeper removes the folder
    finally:
        keeper.close()
        try:
            await_ports(ports)
        finally:
            with awaiting("what the script has written to be removed"):
                folder.clean()


def await_ports(noted: set[int], at_most: float | None = None) -> None:
    """Wait until the next start of the script, or the job, can take these ports, which an earlier start has taken.

    `at_most`: seconds that tuning may still take; None where there is no limit.
    """
    if kept := ports_kept(noted):
        ports = ", ".join(map(str, kept))
        what = f"port {ports}, which the system keeps for a minute after the script has used it in tuning"
        with awaiting(what, soon=_FIRST_WORD):
            for _ in polls(_PORT_IS_KEPT if at_most is None else min(at_most, _PORT_IS_KEPT), _LOOKS):
                if not ports_kept(noted):
                    return


def _require_place_for_recipe(options: Options) -> None:
    """The recipe must take a file after minutes of tuning: its folder is looked at before them."""
    path, folders = options.recipe_path, options.folders
    if options.recipe is None:
        try:
            folders.make()
        except OSError as error:
            why = f"cannot be written ({error.strerror}); name a file with --recipe"
            raise UsageError(f"{folders.recipes}: {why}") from None
    target = Path(os.path.realpath(path))  # a linked recipe stays a link
    if not target.parent.is_dir():
        raise UsageError(f"--recipe {path}: there is no folder {target.parent}; make it, or name another file")
    if not os.access(target.parent, os.W_OK):
        raise UsageError(f"--recipe {path}: the folder {target.parent} takes no files; name another file")
    if options.recipe is not None:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.lstat(target)  # an error where the name is too long
            require_replaceable(target)
        except OSError as error:
            raise UsageError(f"--recipe {path}: cannot be read ({error.strerror}); name another file") from None


def _run_folder(options: Options) -> RunFolder:
    def in_(output: Path) -> RunFolder:
        places = (Path("/tmp"), Path("/var/tmp"))
        folder = RunFolder(output, keep_runs=options.keep_runs, recipe=options.recipe_path, places=places)
        if output in (options.folders.output, OUTPUT) or output != options.output:
            point_to(folder.path)
        return folder

    try:
        return in_(options.output)
    except UsageError as error:
        for other in elsewhere() if options.output in (OUTPUT, options.folders.output) else ():
            with contextlib.suppress(UsageError):  # the user's home may be on the same full disk
                folder = in_(other.output)
                tell(f"{error}; this run's goes to {other.output}")
                return folder
        raise
