"""What is mounted where, by the kernel's own list."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

_WITHOUT_USER_FILES = frozenset(
    "autofs binder binfmt_misc bpf cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs fusectl hugetlbfs"
    " fuse.lxcfs mqueue nsfs proc pstore resctrl rpc_pipefs securityfs selinuxfs sysfs"
    " tracefs".split()
)
"""File systems that show the kernel's state. No gvfs: below it are the shares that a desktop has mounted."""

_OVER = "overlay-over-"


def source_over(covered: Mount) -> str:
    """Name what an attempt's overlay is of: processes in it cannot see the device of what it covers, see `covers`."""
    return f"{_OVER}{covered.device}"


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    number: int
    point: str
    """Absolute path of the mount point."""
    kind: str
    """The file system's type: "ext4"."""
    read_only: bool
    device: str = ""
    """Numbers of the file system's device: "98:0"."""
    source: str = ""
    """What the file system is of, as its mount says: "/dev/root"."""

    @property
    def covers(self) -> str:
        """The device of the file system that this overlay of an attempt covers; "" of any other mount."""
        return self.source.removeprefix(_OVER) if self.source.startswith(_OVER) else ""

    @property
    def is_writable(self) -> bool:
        """Whether users' files may be changed in it: it is not read-only, and no view of the kernel such as /proc."""
        shows_kernel = self.kind in _WITHOUT_USER_FILES or f"{self.point}/".startswith(("/proc/", "/sys/"))
        return not self.read_only and not shows_kernel


def visible_mounts(looks: Callable[[str], None]) -> dict[str, Mount]:
    """Mount point → the mount that a process sees there, sorted so that parents come first.

    It waits for ever at a file system that does not answer. `looks` is told each path before this process looks there.
    """
    found = {}
    for mount in sorted(_listed(), key=lambda mount: mount.point):
        looks(mount.point)
        if _number_at(mount.point) == mount.number:
            found[mount.point] = mount
    return found


def mount_at(path: str) -> Mount | None:
    """The mount on which a path lies; None if this process cannot look there. No other mount is looked at."""
    number = _number_at(path)
    return next((mount for mount in _listed() if mount.number == number), None)


def _listed() -> list[Mount]:
    # The kernel escapes blanks and line feeds in a path. A carriage return, and blanks of other scripts, stay. A path
    # is decoded as Python encodes it: under a locale that is not UTF-8 it would be another one, and the mount unseen.
    with open("/proc/self/mountinfo", "rb") as file:
        return [parse(os.fsdecode(line.removesuffix(b"\n"))) for line in file]


def parse(line: str) -> Mount:
    """One line, as proc_pid_mountinfo(5) describes it.

    >>> parse("36 35 98:0 /mnt1 /a\\\\040b rw,noatime master:1 - ext3 /dev/root rw,errors=continue")
    Mount(number=36, point='/a b', kind='ext3', read_only=False, device='98:0', source='/dev/root')
    """
    fields = line.split(" ")
    after = fields[fields.index("-", 6) + 1 :]
    options = {*fields[5].split(","), *(after[2].split(",") if len(after) > 2 else ())}
    point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
    return Mount(int(fields[0]), point, after[0], "ro" in options, fields[2], after[1])


def mount_of(path: str, mounts: dict[str, Mount]) -> Mount | None:
    """The mount on which an absolute path without symbolic links lies; None where / is no mount, as in a chroot."""
    while path not in mounts and path != "/":
        path = os.path.dirname(path)
    return mounts.get(path)


def _number_at(path: str) -> int:
    """Number of the mount that is on top there; -1 where this process cannot look."""
    try:
        descriptor = os.open(path, os.O_PATH)
    except OSError:
        return -1
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("mnt_id")), -1)
    finally:
        os.close(descriptor)
