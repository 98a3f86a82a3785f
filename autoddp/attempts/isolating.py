"""Which isolation this host allows, and what each attempt is given of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autoddp.attempts.keeper import Keeper, Shelter
from autoddp.commandline.options import Options
from autoddp.commandline.script import script_path
from autoddp.errors import UsageError
from autoddp.isolation import Level
from autoddp.isolation.children import VARIABLE
from autoddp.isolation.kernel.mounts import mount_at
from autoddp.isolation.mps import mps_folder
from autoddp.isolation.overlay import Layers
from autoddp.isolation.plan import SHARED_MEMORY, IsolationPlan
from autoddp.processes.silence import awaiting
from autoddp.runs.folder import RunFolder
from autoddp.topology import free_memory
from autoddp.torchrun.options import FORKED, forks_ranks, other_program
from autoddp.units import Allowance, data_size

NO_LANDLOCK = "AUTODDP_NO_LANDLOCK"
"""If 1, the kernel is not asked to refuse writes under guard: tests make hosts whose kernel has no Landlock so."""
_NO_LAYERS_ON = frozenset(
    ("overlay", "tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "beegfs", "gpfs", "ceph", "afs")
)
"""File systems that cannot hold an overlay's upper layer, or hold it in memory or over the network."""
_BLOCK = 512  # bytes: what the field `st_blocks` counts in, whatever the file system's own blocks are
_ROOMY = 2**30  # bytes: with less than that free, a disk is taken for the layers only if there is no other
_WRITE_NOTHING = frozenset("env nice numactl taskset".split())
"""Programs that do nothing but start another one."""
_ALLOWED = Allowance(share=0.2)  # of what is free on the disk that the layers lie on
_SPARE = 64 * 2**30  # bytes: more than a copy fills between two looks. Other programs may use the disk down to that
_UVM, _HELPER = Path("/dev/nvidia-uvm"), Path("/usr/bin/nvidia-modprobe")
"""A device file of CUDA's, and the program that makes it. The program is root's (setuid), and in an attempt of an
ordinary user no program gets its owner's rights."""
_USE_CUDA = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"
_CUDA_STARTS = 60.0  # seconds; eight GPUs without persistence mode take half of that
_SPARE_FILES = 2**20  # the disk keeps room for so many more files, or for half of what it has room for, if that is less


@dataclass
class Isolation:
    """The level in use, and what it needs of this host."""

    level: Level
    _folder: RunFolder
    why_not_better: str = ""
    """Why a better level was not taken; "" if this is the best one, or the one that was asked for."""
    limit: int = 0
    """Bytes that the script may write while it is being tuned; 0: any number."""
    landlock: bool = False
    _layers: Path | None = None
    _important: tuple[str, ...] = ()
    _syncs: bool = False
    _room: int = 0
    """Bytes that the script may write under guard: into the run's folder, on whatever disk that is."""
    _least_free: int = 0
    """Bytes that stay free on the layers' disk, whoever fills it."""
    _fewest_files: int = 0
    """How many more files there must always be room for on the disk that takes what the script writes."""

    def says(self, activity: str) -> str:
        """One line for the user; `activity` as `Options.activity`."""
        if self.level is Level.OFF:
            return f"isolation: off. What the script writes or deletes during {activity} is real"
        if self.level is Level.OVERLAY:
            return f"isolation: overlay. What the script writes during {activity} vanishes"
        but = f"; no overlay: {self.why_not_better}" if self.why_not_better else ""
        kernel = "and by the kernel (Landlock)" if self.landlock else "without the kernel's help"
        return f"isolation: guard, in Python {kernel}: what it cannot cover ends {activity} before it happens{but}"

    def why_not_started(self, torchrun: argparse.Namespace) -> str:
        """Why the script must not be started to be tuned; "" if it may be.

        Under guard all processes change the scratch folder under one lock, which not every file system has: each write
        of the script's would be an error.

        A Python checks itself from its start. A rank that is forked begins in the middle, and nothing checks another
        program from within, such as a shell.
        """
        if forks_ranks(torchrun):
            return f"{FORKED}, so nothing there keeps what it writes or sends"
        if self.level is Level.GUARD and not self._folder.has_locks:
            return (
                f"the file system of {self._folder.path} has no locks, which guard needs; name another one by --output"
            )
        words = other_program(torchrun)
        if words and self.level is Level.GUARD and not _starts_python(words):
            return f"{words[0]} is no Python, and without an overlay nothing takes back what it writes"
        return ""

    def shelter(self, number: int, attempt: Path, written: Path) -> Shelter:
        """For attempt `number`, whose own folder is `attempt`; `written`: see `variables`."""
        real = (str(attempt), str(self._folder.sockets))
        if self.level is Level.OVERLAY:
            assert self._layers is not None
            memory = free_memory() // 2  # the rest is for the ranks themselves
            layers = Layers(str(self._layers / str(number)), str(self._layers / "kept"), self._syncs, memory)
            return Shelter(Level.OVERLAY, layers, real, self._important)
        if self.level is Level.GUARD:
            # Native libraries share memory in /dev/shm. Python's file operations there are redirected, and its shared
            # memory is checked, see `guard.shared_memory`.
            more = (str(written), str(self.caches), "/dev", "/proc", *filter(None, [mps_folder(os.environ)]))
            listed = str(self._folder.sockets / SHARED_MEMORY)
            return Shelter(Level.GUARD, real=(*real, *more), landlock=self.landlock, shared_memory=listed)
        return Shelter(Level.OFF)

    def variables(self, attempt: Path, written: Path, present: Mapping[str, str]) -> dict[str, str]:
        """Variables for the attempt's processes. OSError where their folders cannot be made.

        `written`: the folder to which guard redirects what the script writes; all hosts share it, if all can reach it.
        """
        if self.level is not Level.GUARD:
            plan = IsolationPlan(self.level, self._folder.socket, copied_at_most=self.limit)
            return {VARIABLE: plan.text()}
        self.caches.mkdir(exist_ok=True)
        writable = (str(attempt), str(self._folder.sockets), str(self.caches))
        plan = IsolationPlan(Level.GUARD, self._folder.socket, str(written), writable, landlock=self.landlock)
        # A guard in Python does not cover compilers, which are programs: their files get folders of their own.
        own = {name: str(self.caches / name.lower()) for name in _OF_COMPILERS if name not in present}
        own["TMPDIR"] = str(self._folder.sockets / "t")  # sockets are made there, and their paths have to be short
        for folder in own.values():
            os.makedirs(folder, exist_ok=True)
        return {VARIABLE: plan.text(), **own}

    @property
    def caches(self) -> Path:
        """Under guard: a folder of the run's for compilers, which all attempts share."""
        return self._folder.path / "caches"

    @classmethod
    def off(cls, folder: RunFolder) -> Isolation:
        """No isolation."""
        return cls(Level.OFF, folder)

    def under_guard(self, why: str) -> Isolation:
        """The isolation of this host by guard; `why`: the reason why no better level was taken."""
        return _guard(self._folder, why, self._room)

    def written(self) -> int:
        """Bytes in the layers now; under guard, in the folders to which it redirects what the script writes."""
        if self.level is Level.GUARD:
            return sum(_size_of(written) for written in self._folder.path.glob("attempt*/written"))
        return _size_of(self._layers) if self._layers is not None else 0

    def fills_the_disk(self) -> str:
        """Why the script must write no more, though `written` is small; "" if it may.

        What native code opens to change (lmdb, HDF5, SQLite), the kernel copies whole, to a file without a name: only
        when the copy is done does it count as written. Empty files, links and folders take no bytes, but a disk holds
        only so many of them.
        """
        place = self._layers or self._folder.path
        with contextlib.suppress(OSError):  # the user has removed the run's folder
            free, files = _free(place), _free_files(place)
            if free < self._least_free:
                return f"only {data_size(free)} are left on the disk of the scratch folder"
            if files is not None and files < self._fewest_files:
                return f"only {files} more files can be made on the disk of the scratch folder"
        return ""


_OF_COMPILERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def choose_isolation(options: Options, folder: RunFolder, keeper: Keeper) -> Isolation:
    """The best level that this host allows, or the one that was asked for; UsageError if the host does not allow it."""
    if options.isolation is Level.OFF:
        return Isolation.off(folder)
    use_cuda_once()
    why, room = "", _room(folder.path, options.scratch_limit)
    if options.isolation is not Level.GUARD:
        found, why = _overlay(options, folder, keeper)
        if found is not None:
            return replace(found, _room=room)
        if options.isolation is Level.OVERLAY:
            raise UsageError(f"--isolation overlay: {why}; without the option the best that this host allows is taken")
    return _guard(folder, why, room)


def use_cuda_once() -> None:
    """Let CUDA make its device files, if nothing has used it since this machine's start: in an attempt it cannot.

    In a process of its own, because with a broken driver it hangs, and not even SIGKILL ends it.
    """
    if _UVM.exists() or not _HELPER.exists():
        return
    nowhere = subprocess.DEVNULL
    with contextlib.suppress(OSError), awaiting("this host's GPU driver"):
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _USE_CUDA], stdin=nowhere, stdout=nowhere, stderr=nowhere
        )
        try:
            process.wait(_CUDA_STARTS)
        except subprocess.TimeoutExpired:
            process.kill()


def _guard(folder: RunFolder, why: str, room: int) -> Isolation:
    from autoddp.isolation.kernel.landlock import supported

    landlock = os.environ.get(NO_LANDLOCK) != "1" and supported()
    return Isolation(Level.GUARD, folder, why, room, landlock, _room=room, _fewest_files=_fewest_files(folder.path))


def _overlay(options: Options, folder: RunFolder, keeper: Keeper) -> tuple[Isolation | None, str]:
    """The overlay, or why there is none."""
    if sys.platform != "linux":
        return None, "only Linux has it"
    if daemon := mps_folder(os.environ):
        return None, f"NVIDIA's MPS daemon at {daemon} shares memory with the job, and it would part them"
    important = tuple(dict.fromkeys(_important(options)))
    why = "no local disk can hold the scratch folder (container file systems, tmpfs and network disks cannot)"
    for parent in sorted(_places(folder), key=_is_nearly_full):
        try:
            layers = folder.private(parent)
        except OSError as error:
            why = f"{parent} cannot hold the scratch folder ({error.strerror})"
            continue
        keeper.removes([str(layers)])  # before it is tried, which takes a while: the launcher may be killed meanwhile
        tried = Layers(str(layers / "try"), str(layers / "kept"), options.diagnose_only)
        why = keeper.why_no_overlay(Shelter(Level.OVERLAY, tried, (str(folder.sockets),), important))
        if not why:
            free, limit = _free(layers), _room(layers, options.scratch_limit)
            # What saving costs is a part of what a diagnosis has to find; trials leave it out.
            syncs = options.diagnose_only
            least = min(_SPARE, free // 2, free - limit)
            found = Isolation(
                Level.OVERLAY,
                folder,
                "",
                limit,
                _layers=layers,
                _important=important,
                _syncs=syncs,
                _least_free=least,
                _fewest_files=_fewest_files(layers),
            )
            return found, ""
    return None, why


def _starts_python(words: Sequence[str]) -> bool:
    """Whether the first word is this Python, a script that names it in its first line, or a program that starts one."""
    if os.path.basename(words[0]) in _WRITE_NOTHING:
        started = next(filter(shutil.which, words[1:]), "")
        return bool(started) and _starts_python([started])
    program = shutil.which(words[0]) or words[0]
    here = os.path.realpath(sys.executable)
    if os.path.realpath(program) == here:
        return True
    with contextlib.suppress(OSError), open(program, "rb") as file:
        first = file.readline(4096).decode(errors="replace")
        return first.startswith("#!") and os.path.realpath(first[2:].strip().partition(" ")[0]) == here
    return False


def _room(place: Path, allowed: Allowance | None) -> int:
    """Bytes that the script may write there."""
    return (allowed or _ALLOWED).bytes_of(_free(place))


def _free(place: Path) -> int:
    """Bytes that are free on its disk."""
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def _free_files(place: Path) -> int | None:
    """How many more files can be made on its disk; None where the file system sets no number, as btrfs."""
    found = os.statvfs(place)
    return found.f_favail if found.f_files else None


def _fewest_files(place: Path) -> int:
    """See the field of this name."""
    with contextlib.suppress(OSError):  # the user has removed the run's folder
        return min(_SPARE_FILES, (_free_files(place) or 0) // 2)
    return 0


def _important(options: Options) -> Iterator[str]:
    """Folders that the script surely uses."""
    yield os.getcwd()
    script = script_path(options.torchrun)
    if script is not None:
        yield str(script.absolute().parent)
    yield os.path.expanduser("~")
    yield tempfile.gettempdir()
    for word in options.torchrun.training_script_args:
        path = os.path.abspath(word.partition("=")[2] or word)
        while not os.path.isdir(path):  # the script may make what is missing
            path = os.path.dirname(path)
        if os.path.sep in word and path != "/":
            yield path


def _places(folder: RunFolder) -> Iterator[Path]:
    """Folders on local disks, one for each disk: where layers may lie."""
    seen = set()
    for place in (str(folder.path), tempfile.gettempdir(), "/tmp", "/var/tmp", os.path.expanduser("~")):
        path = os.path.realpath(place)
        if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
            continue
        found = mount_at(path)
        if found is None:
            continue
        local = found.kind not in _NO_LAYERS_ON and not found.kind.startswith("fuse")
        if local and not found.read_only and found.number not in seen:
            seen.add(found.number)
            yield Path(path)


def _is_nearly_full(folder: Path) -> bool:
    """Whether a script that saves its model may not fit there."""
    return _free(folder) < _ROOMY


def _size_of(folder: Path) -> int:
    """Bytes on disk below a folder; what vanishes meanwhile or cannot be entered counts nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(place, name))
                total += found.st_blocks * _BLOCK if stat.S_ISREG(found.st_mode) else 0
    return total
