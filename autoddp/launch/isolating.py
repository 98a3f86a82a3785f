"""Which isolation this host allows, and what each attempt is given of it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoddp.errors import UsageError
from autoddp.isolation import Level
from autoddp.isolation.mounts import mount_of, visible_mounts
from autoddp.isolation.overlay import Layers
from autoddp.isolation.plan import SHARED_MEMORY, VARIABLE, IsolationPlan
from autoddp.launch.keeper import Keeper, Shelter
from autoddp.launch.options import Options
from autoddp.launch.run_folder import RunFolder
from autoddp.launch.script import script_path
from autoddp.units import Allowance

NO_LANDLOCK = "AUTODDP_NO_LANDLOCK"
"""Set to 1, the kernel is not asked to refuse writes under guard. For tests of hosts whose kernel has no Landlock."""
_NO_LAYERS_ON = frozenset(
    ("overlay", "tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "beegfs", "gpfs", "ceph", "afs")
)
"""File systems that cannot hold an overlay's upper layer, or only in memory or over the network."""
_BLOCK = 512  # bytes: what the field `st_blocks` counts in, whatever the file system's own blocks are
_ALLOWED = Allowance(share=0.2)  # of what is free on the disk that the layers lie on


@dataclass
class Isolation:
    """The level in use, and what it needs of this host."""

    level: Level
    why_not_better: str = ""
    """Why a better level was not taken; "" if none was left out, or none was asked for."""
    limit: int = 0
    """Bytes that the script may write while it is being tuned; 0: any number."""
    landlock: bool = False
    _folder: RunFolder | None = None
    _layers: Path | None = None
    _important: tuple[str, ...] = ()
    _environment: dict[str, str] = field(default_factory=dict)

    @property
    def says(self) -> str:
        """One line for the user."""
        if self.level is Level.OFF:
            return "isolation: off. What the script writes or deletes while it is being tuned is real"
        but = f"; no overlay: {self.why_not_better}" if self.why_not_better else ""
        if self.level is Level.OVERLAY:
            return "isolation: overlay. What the script writes while it is being tuned vanishes"
        kernel = "and by the kernel (Landlock)" if self.landlock else "without the kernel's help"
        return f"isolation: guard, in Python {kernel}: what it cannot cover ends tuning first{but}"

    def shelter(self, number: int, attempt: Path, written: Path) -> Shelter:
        """For attempt `number`, whose own folder is `attempt`; `written`: see `variables`."""
        assert self._folder is not None
        real = (str(attempt), os.path.dirname(self._folder.socket))
        if self.level is Level.OVERLAY:
            assert self._layers is not None
            layers = Layers(str(self._layers / str(number)), str(self._layers / "kept"))
            return Shelter(Level.OVERLAY, layers, real, self._important)
        if self.level is Level.GUARD:
            # Native libraries share memory in /dev/shm; Python's own operations there are redirected.
            more = (str(written), str(self.caches), "/dev", "/proc")
            listed = os.path.join(os.path.dirname(self._folder.socket), SHARED_MEMORY)
            return Shelter(Level.GUARD, real=(*real, *more), landlock=self.landlock, shared_memory=listed)
        return Shelter(Level.OFF)

    def variables(self, attempt: Path, written: Path, present: Mapping[str, str]) -> dict[str, str]:
        """What the environment of the attempt's processes gets.

        `written`: the folder in which guard keeps what the script writes; one for all hosts, if all can reach it.
        """
        assert self._folder is not None
        if self.level is not Level.GUARD:
            plan = IsolationPlan(self.level, self._folder.socket, copied_at_most=self.limit)
            return {VARIABLE: plan.text()}
        writable = (str(attempt), os.path.dirname(self._folder.socket), str(self.caches))
        plan = IsolationPlan(Level.GUARD, self._folder.socket, str(written), writable, landlock=self.landlock)
        # Compilers are programs that no guard in Python reaches: their caches and temporary files get folders here.
        own = {name: str(self.caches / name.lower()) for name in _OF_COMPILERS if name not in present}
        # Sockets are made there, and their paths may not be long.
        own["TMPDIR"] = os.path.join(os.path.dirname(self._folder.socket), "t")
        for folder in own.values():
            os.makedirs(folder, exist_ok=True)
        return {VARIABLE: plan.text(), **own}

    @property
    def caches(self) -> Path:
        """Under guard: a folder of the run's for compilers, which all attempts share."""
        assert self._folder is not None
        return self._folder.path / "caches"

    @classmethod
    def off(cls, folder: RunFolder) -> Isolation:
        """No isolation."""
        return cls(Level.OFF, _folder=folder)

    def under_guard(self, why: str) -> Isolation:
        """The same host under guard."""
        return _guard(self._folder, why)

    def written(self) -> int:
        """Bytes in the layers now."""
        return _size_of(self._layers) if self._layers is not None else 0


_OF_COMPILERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def choose_isolation(options: Options, folder: RunFolder, keeper: Keeper) -> Isolation:
    """The best that this host allows, or what was asked for. UsageError if that cannot be had."""
    if options.isolation is Level.OFF:
        return Isolation.off(folder)
    why = ""
    if options.isolation is not Level.GUARD:
        found, why = _overlay(options, folder, keeper)
        if found is not None:
            return found
        if options.isolation is Level.OVERLAY:
            raise UsageError(f"--isolation overlay: {why}; without the option the best that this host allows is taken")
    return _guard(folder, why)


def _guard(folder: RunFolder | None, why: str) -> Isolation:
    from autoddp.isolation.landlock import supported

    landlock = os.environ.get(NO_LANDLOCK) != "1" and supported()
    found = Isolation(Level.GUARD, why, landlock=landlock, _folder=folder)
    found.caches.mkdir(exist_ok=True)
    return found


def _overlay(options: Options, folder: RunFolder, keeper: Keeper) -> tuple[Isolation | None, str]:
    """The overlay, or why there is none."""
    if sys.platform != "linux":
        return None, "only Linux has it"
    important = tuple(dict.fromkeys(_important(options)))
    why = "no local disk can hold the upper layer (container file systems, tmpfs and network disks cannot)"
    for parent in _places(folder):
        layers = folder.private(parent)
        keeper.removes([str(layers)])  # before it is tried, which takes a while: the launcher may be killed meanwhile
        shelter = Shelter(
            Level.OVERLAY,
            Layers(str(layers / "try"), str(layers / "kept")),
            (os.path.dirname(folder.socket),),
            important,
        )
        why = keeper.why_no_overlay(shelter)
        if not why:
            limit = (options.scratch_limit or _ALLOWED).bytes_of(_free(layers))
            return Isolation(Level.OVERLAY, limit=limit, _folder=folder, _layers=layers, _important=important), ""
    return None, why


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
        if os.path.sep in word and os.path.exists(path):
            yield path if os.path.isdir(path) else os.path.dirname(path)


def _places(folder: RunFolder) -> Iterator[Path]:
    """Folders on local disks, one for each disk: where layers may lie."""
    mounts, seen = visible_mounts(), set()
    for place in (str(folder.path), tempfile.gettempdir(), "/tmp", "/var/tmp", os.path.expanduser("~")):
        path = os.path.realpath(place)
        if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
            continue
        found = mount_of(path, mounts)
        local = found.kind not in _NO_LAYERS_ON and not found.kind.startswith("fuse")
        if local and not found.read_only and found.number not in seen:
            seen.add(found.number)
            yield Path(path)


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _size_of(folder: Path) -> int:
    """Bytes on disk below a folder; what vanishes meanwhile or cannot be entered counts nothing."""
    total, pending = 0, [str(folder)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
        except OSError:
            continue
    return total
