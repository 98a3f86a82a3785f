"""A mount namespace in which reads are real and every write vanishes with the namespace.

    enter(Layers(scratch, kept), real=[logs, socket_folder], important=[...])

The process gets a new root folder. In it each file system on which something could be written is covered by an overlay
with its upper layer in the scratch folder. Root may overlay a whole file system. An ordinary user, in a user namespace,
may not overlay a folder that has other mounts below it: such a folder is rebuilt from its entries.

What programs share without a path, such as queues of System V, is in another namespace, in which there is nothing yet.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autoddp.isolation.kernel.mounts import Mount, mount_of, source_over, visible_mounts
from autoddp.isolation.kernel.syscalls import (
    MS_BIND,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    enter_ipc_namespace,
    enter_mount_namespace,
    give_up_capabilities,
    give_up_network_settings,
    mount,
    pivot_into,
)

_NO_SYNC = ",volatile"
_OPTIONS = (
    # index keeps hard links together; redirect_dir lets an existing folder be renamed; volatile saves syncing what is
    # thrown away. Where the kernel or the user namespace refuses a line, the next one is tried.
    f"index=on,redirect_dir=on,metacopy=off{_NO_SYNC}",
    f"redirect_dir=on,metacopy=off{_NO_SYNC}",
    f"userxattr{_NO_SYNC}",
    "userxattr",
    "",
)
_MS_NODEV, _MS_NOEXEC, _MS_NOATIME, _MS_NODIRATIME, _MS_RELATIME, _ST_RELATIME = 4, 8, 1024, 2048, 1 << 21, 4096
_MEMORY = "/dev/shm"
_SHARED = ("/var/tmp", "/run/lock", "/var/lock")
_SETTINGS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""What containers have read-only of /proc: by it root changes this machine."""
_PAGE = 4096
_LARGEST_COPY = 64 * 2**20  # bytes of a file that is a mount point by itself, such as a container's /etc/hosts


class OverlayRefused(Exception):
    """This host, or this user, cannot have the overlay; the text says why."""


@dataclass(frozen=True)
class Layers:
    """Folders on a local disk for the upper layers of one attempt."""

    scratch: str
    """This attempt's folder; nothing may be in it yet."""
    kept: str
    """Caches of earlier attempts, with which the upper layers begin; `isolation.caches` fills it.

    They cannot be lower layers: an overlay refuses one lower layer inside another, and these lie on the user's disk.
    """
    syncs: bool = False
    """Whether the script's `fsync` waits for the disk, so that saving takes as long as it does in the real job."""
    memory: int = sys.maxsize
    """Bytes that what the script writes to /dev/shm may take there."""

    @property
    def folders(self) -> list[str]:
        """All folders that hold layers."""
        return [os.path.realpath(path) for path in (self.scratch, self.kept) if os.path.isdir(path)]

    def name_of(self, path: str) -> str:
        """The name of the folder with the layers of the overlay over `path`, the same in every attempt."""
        return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]

    def make(self, path: str) -> tuple[str, str]:
        """New upper and work folders for an overlay over `path`; the upper one holds the kept caches."""
        base = os.path.join(self.scratch, self.name_of(path))
        upper, work = os.path.join(base, "upper"), os.path.join(base, "work")
        os.makedirs(work, 0o700)
        kept = os.path.join(self.kept, self.name_of(path))
        if os.path.isdir(kept):
            os.rename(kept, upper)
        else:
            os.mkdir(upper)
        with open(os.path.join(base, "path"), "wb") as file:
            file.write(os.fsencode(path))
        return upper, work


def enter(
    layers: Layers,
    real: Sequence[str],
    important: Sequence[str],
    looks: Callable[[str], None] = lambda path: None,
) -> list[str]:
    """Put this process, which must have one thread, into the overlay; the working folder is the same path as before.

    `real`: folders in which reads and writes are real. `important`: folders that the script surely uses; if one of them
    cannot be overlaid, OverlayRefused is raised. Other folders that cannot be overlaid are read-only; their paths are
    returned.

    Every mount of this host is looked at, so one file system that does not answer makes this wait for ever. `looks` is
    told each path before this process looks there.
    """
    here = os.getcwd()
    with _refusal("this host does not allow a mount namespace"):
        try:
            as_user = enter_mount_namespace()
        except OSError as error:
            raise OSError(error.errno, _why_no_namespace(error)) from None
        with contextlib.suppress(OSError):  # a kernel that has no such namespace, or allows no more of them
            enter_ipc_namespace()
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
    build = _Build(layers, visible_mounts(looks), as_user, list(_followed(important, looks)), looks)
    with _refusal("the overlay cannot be mounted"):
        build.run(list(_followed(real, looks)))
        pivot_into(build.root)
    with _refusal("the working folder is not there under the overlay"):
        os.chdir(here)
    if as_user and os.geteuid() != 0:  # root of a container has rights without a namespace, too
        with contextlib.suppress(OSError):
            give_up_capabilities()
    elif not as_user:
        with contextlib.suppress(OSError):  # a container may forbid it, and has mostly not given the right
            give_up_network_settings()
    _try_writing(here)
    return build.read_only


def _why_no_namespace(error: OSError) -> str:
    """Why no namespace could be made. Where too many exist, the kernel says "no space", and this names its limits."""
    if error.errno != errno.ENOSPC:
        return error.strerror or str(error)
    limits = []
    for kind in ("user", "mnt"):
        path = f"/proc/sys/user/max_{kind}_namespaces"
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            limits.append(f"{path} is {file.read().strip()}")
    return f"no more of them are allowed: {', '.join(limits)}"


def _followed(paths: Sequence[str], looks: Callable[[str], None]) -> Iterator[str]:
    for path in paths:
        looks(path)
        yield os.path.realpath(path)


@contextlib.contextmanager
def _refusal(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        raise OverlayRefused(f"{what} ({error.strerror}{where})") from error


@dataclass
class _Build:
    """Builds the new root folder."""

    layers: Layers
    mounts: dict[str, Mount]
    as_user: bool
    important: list[str]
    looks: Callable[[str], None]
    read_only: list[str] = field(default_factory=list)
    _options: str | None = None

    @property
    def root(self) -> str:
        """The path at which the new root folder is mounted until it is the root."""
        return os.path.join(self.layers.scratch, "root")

    def run(self, real: list[str]) -> None:
        os.makedirs(self.root)
        if self.as_user:
            mount("tmpfs", self.root, "tmpfs", data="size=16m,mode=755")
        self._cover("/")
        self._part_queues()
        for path in real:
            self._bind(path)
        if not self.as_user:  # whom the kernel lets change none of it
            self._keep_settings()
        # After the real folders: the launcher's own socket stays, too, where the script empties the temporary folder.
        for path in _listening_sockets(self.looks):
            with contextlib.suppress(OSError):  # gone meanwhile, or in a folder of another user
                self._bind_read_only(path)
        for path in self.layers.folders:
            # Hidden, because a write into the layers themselves would break the overlay on top of them.
            if os.path.isdir(self._new(path)):
                mount("tmpfs", self._new(path), "tmpfs", flags=MS_RDONLY, data="size=4k,mode=700")

    def _part_queues(self) -> None:
        """Show the attempt's own message queues where those of this host are mounted: a removed one would be gone."""
        for path in (path for path, here in self.mounts.items() if here.kind == "mqueue"):
            try:
                mount("none", self._new(path), "mqueue")
            except OSError:  # no namespace of its own
                self._remount_read_only(path)

    def _keep_settings(self) -> None:
        """Make the files read-only by which the kernel is told settings of this machine, and limits of its groups."""
        for path in filter(os.path.exists, _SETTINGS):
            self._bind(path, MS_REC)
            self._remount_read_only(path)
        for path, here in self.mounts.items():
            # Formats of programs are mounted below /proc/sys; autofs would mount them, and is none.
            if f"{path}/".startswith(("/sys/", "/proc/sys/")) and here.kind != "autofs":
                self._remount_read_only(path)

    def _new(self, path: str) -> str:
        return self.root + path if path != "/" else self.root

    def _bind(self, path: str, flags: int = 0, source: str = "") -> None:
        """Let a path of the new root show the same file or folder as now, or `source`."""
        mount(source or path, self._new(path), flags=MS_BIND | flags)

    def _bind_read_only(self, path: str) -> None:
        """Bind what is no folder, read-only: its mode, owner and times stay. Sockets and devices still work."""
        self._bind(path)
        self._remount_read_only(path)

    def _remount_read_only(self, path: str) -> None:
        new = self._new(path)
        mount("none", new, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | _locked_flags(new))

    def _below(self, path: str) -> list[str]:
        """Mount points below a folder, parents first."""
        prefix = path.rstrip("/") + "/"
        return [point for point in self.mounts if point != path and point.startswith(prefix)]

    def _cover(self, path: str) -> None:
        """Put `path`, and everything that is mounted below it, into the new root."""
        here = self.mounts.get(path)
        below = self._below(path)
        self.looks(path)
        if not os.path.isdir(path):
            if here is not None and _is_dead(path):
                return None  # it is left out: in its place is the empty folder beneath it
            return self._cover_file(path)
        if here is not None and not here.is_writable:
            self._bind(path, MS_REC)
            below = [point for point in below if self.mounts[point].is_writable]
            if path == "/dev" and not here.read_only and _MEMORY not in self.mounts and _is_folder(_MEMORY):
                below.append(_MEMORY)  # in a chroot, to which /dev was given alone, it is a folder of devtmpfs
            if self.as_user:  # nothing can be rebuilt in a folder that is bound
                for point in below:
                    self._cover_alone(point)
                return None
        elif self.as_user and (below or _has_devices(path)):
            return self._rebuild(path)
        else:
            self._cover_alone(path)
        # Each overlay hides what is mounted below its folder, also what is read-only, so that is put there again.
        done: list[str] = []
        for point in below:
            if not any(point.startswith(f"{other}/") for other in done):
                self._cover(point)
                done.append(point)
        return None

    def _cover_alone(self, path: str) -> None:
        """Put an overlay over one folder; where that fails, the folder is read-only."""
        try:
            self._overlay(path)
        except OSError as error:
            if path == "/" or self._is_important(path):
                raise OSError(error.errno, error.strerror, path) from None
            self._bind(path, MS_REC if self.as_user else 0)
            self._make_read_only(path)

    def _overlay(self, path: str) -> None:
        if path == _MEMORY:
            return self._overlay_in_memory(path)
        upper, work = self.layers.make(path)
        _copy_status(path, upper)
        if self.as_user:
            for folder in (*self.important, *_followed(_SHARED, self.looks)):
                _prepare(path, folder, upper)
        self._mount_overlay(path, upper, work, self._new(path))
        return None

    def _overlay_in_memory(self, path: str) -> None:
        """For shared memory the upper layer is in memory as well.

        A file that is there already and is opened to be changed, as numpy's memmap does unless it is told otherwise, is
        copied. Without a limit of its own a data set that fills half of the memory would fill the other half.
        """
        found = os.statvfs(path)
        size = min(found.f_blocks * found.f_frsize, max(self.layers.memory, _PAGE))  # 0 would be no limit
        place = os.path.join(self.layers.scratch, "memory")
        os.makedirs(place)
        mount("tmpfs", place, "tmpfs", data=f"size={size},mode=755")
        upper, work = os.path.join(place, "upper"), os.path.join(place, "work")
        os.mkdir(upper)
        os.mkdir(work)
        _copy_status(path, upper)
        self._mount_overlay(path, upper, work, self._new(path))

    def _mount_overlay(self, lower: str, upper: str, work: str, target: str) -> None:
        candidates = _candidates(self.layers.syncs, work) if self._options is None else [self._options]
        beneath = mount_of(lower, self.mounts)
        source = "overlay" if beneath is None else source_over(beneath)
        for number, options in enumerate(candidates):
            # What a refused attempt has left in a work folder would make the next one fail too.
            place = os.path.join(work, str(number))
            os.mkdir(place, 0o700)
            try:
                _mount_overlay(lower, upper, place, target, source, options)
            except OSError:
                if options == candidates[-1]:
                    raise
            else:
                self._options = options
                return

    def _rebuild(self, path: str) -> None:
        """Make a plain folder in the place of one with mounts or devices below it, and mount each entry in it."""
        writable = os.access(path, os.W_OK)
        if path in self.important and writable:
            # Each entry is a mount point, so the script could neither rename nor delete it.
            raise OSError(22, "there are mounts below a folder in which the script works", path)
        if writable and not self._is_important(path):
            self._bind(path, MS_REC)
            self._make_read_only(path)
            return
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            try:
                self._cover_entry(entry)
            except OSError:
                if os.path.lexists(entry.path):
                    raise
                new = self._new(entry.path)  # of what has gone meanwhile, as temporary files of other programs do
                with contextlib.suppress(OSError):
                    (os.rmdir if os.path.isdir(new) else os.unlink)(new)
        _copy_status(path, self._new(path))

    def _cover_entry(self, entry: os.DirEntry[str]) -> None:
        new = self._new(entry.path)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), new)
        elif entry.is_dir():
            os.mkdir(new)
            self._cover(entry.path)
        elif stat.S_ISFIFO(os.lstat(entry.path).st_mode):
            os.mkfifo(new)  # as in an overlay, it has no other end
        else:
            os.close(os.open(new, os.O_CREAT | os.O_WRONLY))
            self._cover_file(entry.path)

    def _cover_file(self, path: str) -> None:
        """A file that is a mount point, or lies in a folder that is rebuilt: a copy of it, if it could be changed."""
        if os.path.isfile(path) and os.access(path, os.W_OK):
            if os.path.getsize(path) > _LARGEST_COPY:
                raise OSError(27, "a large file is a mount point", path)
            copy = os.path.join(self.layers.scratch, f"file-{self.layers.name_of(path)}")
            shutil.copy2(path, copy)
            self._bind(path, source=copy)
        else:
            self._bind_read_only(path)

    def _make_read_only(self, path: str) -> None:
        """Mount again, read-only, what was bound at `path` and below it."""
        for point in (path, *self._below(path)):
            if _is_dead(point):  # nothing can be written there, and nothing be told about it
                continue
            flags = _locked_flags(self._new(point)) if os.path.isdir(self._new(point)) else 0
            mount("none", self._new(point), flags=MS_BIND | MS_REMOUNT | MS_RDONLY | flags)
        self.read_only.append(path)

    def _is_important(self, path: str) -> bool:
        prefix = path.rstrip("/") + "/"
        here = mount_of(path, self.mounts)
        return any(f"{place}/".startswith(prefix) and mount_of(place, self.mounts) is here for place in self.important)


def _has_devices(path: str) -> bool:
    """Whether the path is /dev, or a folder in it such as /dev/infiniband and /dev/dri, and devices are below it.

    The kernel opens no device through a file system that was mounted in a user namespace: NCCL would take TCP in place
    of InfiniBand without an error, and a GPU would not be there.
    """
    if not f"{path}/".startswith("/dev/"):
        return False
    return any(_is_device(os.path.join(place, name)) for place, _, names in os.walk(path) for name in names)


def _is_device(path: str) -> bool:
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # gone meanwhile, as files of other programs in /dev/shm come and go
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _is_dead(path: str) -> bool:
    """Whether the server of a FUSE mount has ended: each question is answered by an error, and for good."""
    try:
        os.statvfs(path)
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


def _candidates(syncs: bool, work: str) -> list[str]:
    """Options to try, best first; `work` is a folder on the disk of the upper layer."""
    options = _OPTIONS if _takes_notes_of_root(work) else [each for each in _OPTIONS if "redirect_dir" not in each]
    return list(dict.fromkeys(each.removesuffix(_NO_SYNC) if syncs else each for each in options))


def _takes_notes_of_root(folder: str) -> bool:
    """Whether an overlay may keep its notes in attributes that only root of the whole host may set.

    In a user namespace it may not. Linux before 6.12 mounts it there all the same, and keeps no notes: then no folder
    of the user's can be removed ("Input/output error").
    """
    try:
        os.setxattr(folder, "trusted.autoddp", b"y")
        os.removexattr(folder, "trusted.autoddp")
    except OSError:
        return False
    return True


def _mount_overlay(lower: str, upper: str, work: str, target: str, source: str, options: str) -> None:
    # Descriptors in place of paths: a path may hold the characters that separate options.
    with contextlib.ExitStack() as stack:
        names = []
        for path in (lower, upper, work):
            descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            names.append(f"/proc/self/fd/{descriptor}")
        layers = "lowerdir={},upperdir={},workdir={}".format(*names)
        mount(source, target, "overlay", data=f"{layers},{options}" if options else layers)


def _copy_status(path: str, upper: str) -> None:
    """Give an upper folder the owner, mode and times of `path`: they are what a process sees there."""
    found = os.stat(path)
    mode = stat.S_IMODE(found.st_mode)
    with contextlib.suppress(OSError):  # an owner that is not mapped here
        os.chown(upper, found.st_uid, found.st_gid)
    if os.stat(upper).st_uid != found.st_uid or (found.st_uid == os.geteuid() != 0 and not _is_owned(path)):
        # The upper folder belongs to this user, who must not be able to do more in it than in the real one.
        allowed = sum(bit for bit in (os.R_OK, os.W_OK, os.X_OK) if os.access(path, bit))
        mode = (mode & 0o7077) | (allowed << 6)
    os.chmod(upper, mode)
    os.utime(upper, ns=(found.st_atime_ns, found.st_mtime_ns))


def _is_owned(folder: str) -> bool:
    """Whether this user owns a folder that seems to be his: in a user namespace all others' are of the user nobody."""
    try:
        os.close(os.open(folder, os.O_DIRECTORY | os.O_NOATIME))  # refused to whom it does not belong
    except OSError:
        return False
    return True


def _prepare(path: str, folder: str, upper: str) -> None:
    """Make `folder`, if it lies below `path`, in the upper layer before the overlay is mounted.

    A write in it would make the overlay copy each folder above it, and a user namespace refuses that for folders of
    other owners. Folders that are in the upper layer already are merged with the real ones.
    """
    if not folder.startswith(path.rstrip("/") + "/") or not os.path.isdir(folder):
        return
    here = path
    for part in os.path.relpath(folder, path).split("/"):
        here, upper = os.path.join(here, part), os.path.join(upper, part)
        if not os.path.isdir(upper):
            os.mkdir(upper)
            _copy_status(here, upper)


def _locked_flags(path: str) -> int:
    """The mount options that a user namespace must keep when it mounts something again."""
    found = os.statvfs(path).f_flag
    same = found & (os.ST_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_NOATIME | _MS_NODIRATIME)
    return same | (_MS_RELATIME if found & _ST_RELATIME else 0)


def _listening_sockets(looks: Callable[[str], None]) -> Iterator[str]:
    """Unix sockets with a listener, by the kernel's list: through an overlay they would have no other end.

    Named pipes are no part of this. Under the overlay they have no other end, so what a program writes reaches nobody
    outside, and `isolation.pipes` ends tuning before Python opens one.
    """
    # A line feed in a path is not escaped: the parts of such a line are no paths of sockets.
    with open("/proc/net/unix", "rb") as file:
        lines = [os.fsdecode(line.removesuffix(b"\n")) for line in file]
    listed = {path for line in lines for path in line.split(maxsplit=7)[7:] if path[0] == "/"}
    for path in sorted(listed):
        looks(path)
        if _is_socket(path):
            yield path


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _try_writing(folder: str) -> None:
    """Create, change, rename and remove a file as the script will: a user namespace refuses some groups' files."""
    if not os.access(folder, os.W_OK):
        return
    with _refusal("writing in the working folder fails under the overlay"):
        path = os.path.join(folder, f".autoddp-{os.getpid()}")
        for mode in ("xb", "ab"):
            with open(path, mode) as file:
                file.write(b"autoddp")
        os.replace(path, f"{path}.renamed")
        os.unlink(f"{path}.renamed")
