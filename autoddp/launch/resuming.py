"""A study that was cut off goes on at the next start: what its launcher had measured before it was killed is kept.

`study.json` stands beside the journal as long as a study is not over. It says of what job the measurements are: the
next launcher that tunes the same job, on the same machine, replays them and goes on where they end. The journals of
several hosts may have been cut off at different places: the one of the host that leads counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoddp.launch.journal import Entry
from autoddp.launch.options import Request
from autoddp.launch.owner import marked_in
from autoddp.launch.run_folder import RunFolder
from autoddp.study import Plan
from autoddp.version import __version__
from autoddp.wire import JobFacts

_STUDY = "study.json"
_OLDEST = 24 * 3600.0  # seconds: later the machine, or what the script reads, is likely another one
_FEWEST = 3  # entries that are worth a word
_MEASURED = ("link",)
"""Facts that are figures of the moment."""


def study_begins(folder: RunFolder, request: Request, plan: Plan, facts: JobFacts) -> None:
    """Note of what job the journal's measurements are."""
    with contextlib.suppress(OSError):  # then this study is not resumed
        (folder.path / _STUDY).write_text(_of(request, plan, facts), encoding="utf-8")


def study_is_over(folder: RunFolder) -> None:
    """Nothing of it is to be resumed."""
    with contextlib.suppress(OSError):
        (folder.path / _STUDY).unlink()


def cut_off(folder: RunFolder, request: Request, plan: Plan, facts: JobFacts) -> tuple[str, Sequence[Entry]]:
    """The run folder's name and the measurements of the newest study of this job that was cut off; "" without one."""
    wanted, found = _of(request, plan, facts), []
    for run in marked_in(folder.path.parent):
        if run.path == folder.path or not (run.has_ended() or run.may_be_cleaned()):
            continue
        with contextlib.suppress(OSError, UnicodeDecodeError):
            is_it = (run.path / _STUDY).read_text(encoding="utf-8") == wanted
            if is_it and time.time() - run.mark.made < _OLDEST:
                found.append((run.mark.made, run.path))
    for _, path in sorted(found, reverse=True)[:1]:
        entries = _entries(path / folder.journal.name)
        if len(entries) >= _FEWEST:
            return path.name, entries
    return "", ()


def _of(request: Request, plan: Plan, facts: JobFacts) -> str:
    """All that the measurements and the order in which they are made depend on, as far as it can be known."""
    torchrun = request.torchrun
    job = {
        "autoddp": __version__,
        "script": request.script,
        "content": _digest(Path(request.script)),
        "arguments": list(torchrun.training_script_args),
        "plan": asdict(plan),
        "facts": {name: value for name, value in asdict(facts).items() if name not in _MEASURED},
    }
    return json.dumps(job, indent=1, sort_keys=True, default=str) + "\n"


def _digest(script: Path) -> str:
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()
    except OSError:
        return ""  # a module or a program, known by its name


def _entries(journal: Path) -> list[Entry]:
    """Those that can be read, up to the first one that cannot: a launcher may be killed in the middle of a line."""
    entries: list[Entry] = []
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        for line in journal.read_text(encoding="utf-8").splitlines():
            plain: dict[str, Any] = json.loads(line)
            entry = Entry.of(plain)
            if entry.asked.index != len(entries):
                break
            entries.append(entry)
    return entries
