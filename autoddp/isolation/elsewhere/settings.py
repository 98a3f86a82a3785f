"""Ends tuning before the script changes a setting of this machine: its clock, its name, or a file of the kernel.

Such a file may be written in Python or in a shell line.

An attempt ends by SIGKILL, so the script never gets to restore the old value.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from typing import Any

from autoddp.isolation import real
from autoddp.isolation.elsewhere.patch import Stop
from autoddp.isolation.hooks import check_events, replace_everywhere

_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_QUEUES = ("/dev/mqueue/", "/dev/hugepages/")
"""File systems of the kernel in which programs keep what they share."""
_OWN_CGROUP = r"fs/cgroup/[^\s\"';|&)]*/(?:cgroup\.procs|cgroup\.threads|tasks)\b"
_SETTING = rf"/proc/(?!self/|thread-self/|\d|\$)|/sys/(?!{_OWN_CGROUP})|/dev/cpu/|/dev/mqueue/|/dev/hugepages/"
"""The beginnings of the paths. A process may write of itself below /proc/self, and may enter a group of processes."""
_FILES = r"/proc/\d+/(?:root|cwd|fd)/"
"""What a process sees and has open."""
_PATH = re.compile(_SETTING)
_OF_A_PROCESS = re.compile(r"/proc/(\d+)(?:/task/\d+)?/(?:root|cwd|fd/\d+)")
_OF_ANOTHER = re.compile(r"/proc/(\d+)/")
_IN_SHELL = re.compile(
    # a redirection, tee and dd; then the programs whose last argument is changed
    rf"""(?:>[>|&]?\s*|\btee\s[^|;&\n]*?|\bof=)["']?((?:{_SETTING}|{_FILES})[^\s"';|&)]*)"""
    rf"""|\b(?:cp|mv|ln|install|mkdir|rmdir)\s[^|;&\n]*?\s["']?((?:{_SETTING}|{_FILES})[^\s"';|&)]*)["']?\s*(?:$|[|;&)\n])"""
)


def watch_settings(stop: Stop) -> None:
    """Watch settings from now on, by audit events."""

    def opened(path: Any, _mode: Any, flags: int) -> None:
        if flags & _CHANGES and isinstance(path, (str, bytes)):
            changed(path)

    def changed(path: Any, *_more: Any) -> None:
        place = real.resolved(os.fsdecode(path), _is_of_another)
        if _PATH.match(place):
            stop(f"the script changes {place}, which all programs of this machine share")
        if place.startswith("/proc/") and place.split("/")[2] != str(os.getpid()):
            stop(f"the script changes {place}, which belongs to another process")
        if place.startswith("/dev/") and _is_disk(place):
            stop(f"the script writes to the disk {place}")

    def removed(path: Any, *_more: Any) -> None:
        if isinstance(path, (str, bytes)) and os.path.abspath(os.fsdecode(path)).startswith(_QUEUES):
            changed(path)

    def made(path: Any, *_more: Any) -> None:
        if isinstance(path, (str, bytes)) and os.path.abspath(os.fsdecode(path)).startswith("/sys/"):
            changed(path)  # a group of processes, which would stay

    events: dict[str, Callable[..., None]] = {"open": opened, "os.truncate": changed, "os.remove": removed}
    events |= {"os.mkdir": made, "os.rmdir": made}
    check_events({event: _careful(check) for event, check in events.items()})
    check_events({"socket.sethostname": lambda *_: stop("the script changes the name of this machine")})
    for name in ("clock_settime", "clock_settime_ns"):
        replace_everywhere(getattr(time, name, None), lambda _: lambda *_: stop("the script sets this machine's clock"))


def changed_by(words: Sequence[str], folder: str) -> str:
    """ "" if a command in `folder`, or a redirection such as [">", path], changes no such file, else what it changes.

    A word may be a line for another shell. Under the overlay the kernel lets no program change them.
    """
    found = _IN_SHELL.search(" ".join([*words[:1], *(_placed(word, folder) for word in words[1:])]))
    place = (found[1] or found[2]) if found else ""
    process = _OF_ANOTHER.match(place)
    if process is not None:
        return f"a command changes {place}, which belongs to another process" if int(process[1]) != os.getpid() else ""
    return f"a command changes {place}, which all programs of this machine share" if place else ""


def _is_of_another(path: str) -> bool:
    """Whether another process sees something else at this path, or has something else open, than its link says.

    The kernel does not go by the text of these links: it goes to the file itself, which no overlay covers.
    """
    found = _OF_A_PROCESS.fullmatch(path)
    return found is not None and found[1] != str(os.getpid())


def _placed(word: str, folder: str) -> str:
    """A word with its whole path if it is that of a file in `folder`, or dd's `of=path`. All settings exist already."""
    option, equals, path = word.rpartition("=")
    place = os.path.join(folder, path)
    return option + equals + os.path.abspath(place) if path and os.path.exists(place) else word


def _careful(check: Callable[..., None]) -> Callable[..., None]:
    def checked(*arguments: Any) -> None:
        try:
            check(*arguments)
        except (OSError, TypeError, ValueError, AttributeError):
            return  # arguments that the call itself will refuse

    return checked


def _is_disk(path: str) -> bool:
    try:
        return stat.S_ISBLK(real.stat(path).st_mode)
    except OSError:
        return False
