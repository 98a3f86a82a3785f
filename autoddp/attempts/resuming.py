"""A study that was cut off goes on at the next start: what its launcher had measured before it was killed is kept.

`study.json` stands beside the journal as long as a study is not over. It says of what job the measurements are: the
next launcher that tunes the same job, on the same machine, replays them and goes on where they end. The journals of
several hosts may have been cut off at different places: the one of the host that leads counts.

A study that has come no further than the one before it, and was killed as well, is not begun a third time. Where memory
is short, the kernel may end all that a container runs, and a container that is started again would tune for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from autoddp.attempts.starts.start_journal import MeasuredStart, Shown, read_starts
from autoddp.codec import decode, plain
from autoddp.commandline.options import Options
from autoddp.commandline.saved_recipes import arguments_digest
from autoddp.commandline.script import ScriptSource, script_path
from autoddp.commandline.secret_words import is_secret, without_secrets
from autoddp.cpus import usable_cpus
from autoddp.files import write_private
from autoddp.runs.folder import RunFolder
from autoddp.runs.owner import marked_in
from autoddp.settings import StudySettings
from autoddp.version import __version__
from autoddp.wire import Entry, JobFacts

Job = Mapping[str, object]
"""What is being tuned, as far as the launcher knows it."""
_STUDY = "study.json"
_OLDEST = 24 * 3600.0  # seconds: after that the machine, or the data that the script reads, has likely changed
_FEWEST = 3  # measurements; fewer are made again
_MEASURED = ("link",)
"""Facts that are measured, so that they differ from start to start."""
_LARGEST = 2**20  # bytes of a file in the arguments that is compared
_OF_LIBRARIES = (
    *("CUBLAS_", "CUDA_", "CUDNN_", "GLIBC_", "GLOO_", "GOMP_", "HIP_", "HSA_", "KMP_", "LD_PRELOAD", "MALLOC_"),
    *("MKL_", "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "ROCR_", "TORCH", "TRITON_"),
)
"""Beginnings of the names of variables that change how fast a step is, or what is in it."""


def study_begins(folder: RunFolder, job: Job, settings: StudySettings, facts: JobFacts | None) -> None:
    """Note of what job the journal's measurements are; `facts` are None where the journal itself has them."""
    with contextlib.suppress(OSError):  # then this study is not resumed
        write_private(folder.path / _STUDY, _of(job, settings, facts))


def study_is_over(folder: RunFolder) -> None:
    """Nothing of it is to be resumed, nor of earlier ones of the same job: it has gone on with them, or begun anew."""
    place = folder.path / _STUDY
    with contextlib.suppress(OSError, ValueError):  # it was not written, or in part
        over = place.read_text(encoding="utf-8")
        place.unlink()
        for run in _cut_off_before(folder):
            if run.says == over or (not run.has_facts and _job_of(run.says) == _job_of(over)):
                with contextlib.suppress(OSError):
                    (run.path / _STUDY).unlink()


def killed_again(folder: RunFolder, job: Job, settings: StudySettings) -> str:
    """Why this job is not tuned: its last two studies were killed at one place; "" where they were not."""
    now = _job_of(_of(job, settings, None))
    of_this = [run for run in _cut_off_before(folder) if run.is_young and _job_of(run.says) == now]
    newest = max(of_this, key=lambda run: run.made, default=None)
    # Several hosts may share a name, and a job may run several times at once: what ends all of them is one kill.
    earlier = [run for run in of_this if newest is not None and run.wrote < newest.made]
    before = max(earlier, key=lambda run: run.made, default=None)
    if newest is None or before is None or newest.in_order or before.in_order or newest.lines > before.lines:
        return ""
    at = f"after {newest.lines} measurements" if newest.lines else "before the first measurement"
    return f"tuning was killed twice {at}, as where memory is short; --fresh tunes again"


def cut_off(folder: RunFolder, job: Job, settings: StudySettings, facts: JobFacts) -> tuple[str, Sequence[Entry]]:
    """The run folder's name and the measurements of the newest study of this job that was cut off; "" without one."""
    if (path := _newest_cut_off(folder, _of(job, settings, facts))) is not None:
        entries = _certain(_entries(path / folder.journal.name))
        if len(entries) >= _FEWEST:
            return path.name, entries
    return "", ()


@dataclass(frozen=True)
class CutOff:
    """A study that was cut off, whose measurements are starts."""

    name: str = ""
    """The run folder's."""
    shown: Shown | None = None
    """What its first start has shown; None where there is no such study."""
    starts: Sequence[MeasuredStart] = ()

    @property
    def says(self) -> str:
        """A line for the user."""
        return going_on(self.name, len(self.starts))


def starts_cut_off(folder: RunFolder, job: Job, settings: StudySettings) -> CutOff:
    """The newest study of this job that was cut off, if its measurements are starts."""
    if (path := _newest_cut_off(folder, _of(job, settings, None))) is not None:
        found = read_starts(path / folder.journal.name)
        if found is not None and len(found[1]) >= _FEWEST:
            return CutOff(path.name, *found)
    return CutOff()


def going_on(name: str, measurements: int) -> str:
    """A line for the user: a study goes on with what the run of that name has measured."""
    return f"going on with the tuning run {name}, cut off after {measurements} measurements; --fresh begins anew"


@dataclass(frozen=True)
class _CutOffRun:
    """An earlier run whose launcher has gone and whose study is not over."""

    made: float
    path: Path
    in_order: bool
    """Whether its launcher has ended it, as for a signal; else that was killed."""
    says: str
    """See `_of`."""

    journal: Path

    @property
    def wrote(self) -> float:
        """When it last wrote down something, in seconds since 1970."""
        return max(_modified(self.path / _STUDY), _modified(self.journal))

    @property
    def lines(self) -> int:
        """The number of its measurements."""
        with contextlib.suppress(OSError):
            return self.journal.read_bytes().count(b"\n")
        return 0

    @property
    def is_young(self) -> bool:
        """Whether it is not too long ago."""
        return time.time() - self.made < _OLDEST

    @property
    def has_facts(self) -> bool:
        """Whether the script has come to its first steps."""
        return bool(json.loads(self.says).get("facts"))


def _newest_cut_off(folder: RunFolder, wanted: str) -> Path | None:
    """The folder of the newest study of this job that was cut off, and not too long ago."""
    found = [(run.made, run.path) for run in _cut_off_before(folder) if run.says == wanted and run.is_young]
    return max(found)[1] if found else None


def _certain(entries: Sequence[Entry]) -> Sequence[Entry]:
    """All but a failure at the end, which is measured again: what has cut the study off may be its cause.

    Where a host is lost, the ranks of the others fail seconds before their launchers know why.
    """
    return entries[:-1] if entries and entries[-1].done is None else entries


def _cut_off_before(folder: RunFolder) -> Iterator[_CutOffRun]:
    """Earlier runs of any job whose launchers have gone and whose studies are not over."""
    for run in marked_in(folder.path.parent):
        is_ours = run.mark.owner.host == socket.gethostname()  # not that of another container on this host
        is_free = is_ours and (run.has_ended() or run.may_be_cleaned())
        if run.path == folder.path or not is_free:
            continue
        with contextlib.suppress(OSError, ValueError):  # none there, or it was cut off in the middle
            says = (run.path / _STUDY).read_text(encoding="utf-8")
            _job_of(says)
            yield _CutOffRun(run.mark.made, run.path, run.mark.ended, says, run.path / folder.journal.name)


def _of(job: Job, settings: StudySettings, facts: JobFacts | None) -> str:
    """All that the measurements and the order in which they are made depend on, as far as it can be known."""
    known = {name: value for name, value in plain(facts or {}).items() if name not in _MEASURED}
    return (
        json.dumps({**job, "settings": asdict(settings), "facts": known}, indent=1, sort_keys=True, default=str) + "\n"
    )


def _job_of(says: str) -> object:
    """All of it but the facts, which are known only when the script has come to its first steps."""
    if not isinstance(known := json.loads(says), dict):
        raise ValueError(f"no study: {says[:80]!r}")
    return {name: value for name, value in known.items() if name != "facts"}


def _modified(file: Path) -> float:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def job_now(options: Options) -> Job:
    """What is being tuned. To be called before the script is started: the user may change files while it is tuned.

    Arguments, variables and files are kept as digests. What looks like a secret is no part of them: it changes nothing
    that is measured.
    """
    arguments = without_secrets(options.torchrun.training_script_args)
    source = ScriptSource(options.torchrun)
    return {
        "autoddp": __version__,
        "folder": _here(),
        "script": options.script,
        "files": {str(path): _digest(path) for path in _files(options, source)},
        "arguments": arguments_digest(options),
        "named in them": {word: _digest(Path(word)) for word in sorted(set(_files_named(arguments)))},
        "environment": _digest_of(json.dumps(_variables(source), sort_keys=True)),
        "cpus": usable_cpus(),
    }


def changed_since(job: Job) -> list[str]:
    """The files of `job`, made by `job_now`, that are not as they were: the script's, and those its arguments name.

    Each is looked at by itself. The script may import it no longer, or be half written: it is the same nevertheless.
    """
    files = {**cast(Mapping[str, str], job["files"]), **cast(Mapping[str, str], job["named in them"])}
    return [name for name, digest in files.items() if _digest(Path(name)) != digest]


def _here() -> str:
    try:
        return os.path.realpath(os.getcwd())
    except OSError:
        return ""  # it was removed


def _files(options: Options, source: ScriptSource) -> list[Path]:
    """The script's own, and the user's modules that it imports. A pipe is left alone: it can be read only once."""
    script = script_path(options.torchrun)
    files = [*source.files, *([script] if script is not None and script.is_file() else [])]
    return sorted(set(files))


def _files_named(arguments: Sequence[str]) -> Iterator[str]:
    """Small files that the script's arguments name, such as a configuration; large ones are data."""
    for argument in arguments:
        word = argument.partition("=")[2] or argument
        with contextlib.suppress(OSError, ValueError):
            found = os.stat(word)
            if stat.S_ISREG(found.st_mode) and found.st_size <= _LARGEST:
                yield word


def _variables(source: ScriptSource) -> dict[str, str]:
    """Environment variables that the script may read, and those that torch and the libraries below it read."""
    return {
        name: without_secrets([value])[0]
        for name, value in os.environ.items()
        if (name.startswith(_OF_LIBRARIES) or source.mentions(name)) and not is_secret(name)
    }


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _entries(journal: Path) -> list[Entry]:
    """The entries up to the first one that cannot be read: a launcher may be killed in the middle of a line."""
    entries: list[Entry] = []
    with contextlib.suppress(OSError, ValueError):
        for line in journal.read_text(encoding="utf-8").splitlines():
            entry = decode(line, Entry)
            if entry.asked.index != len(entries):
                break
            entries.append(entry)
    return entries
