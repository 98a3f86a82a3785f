"""The kinds of fault: how each is planted, at which moments, and how a launch must end that meets it."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab import unavailable

from faults.rooms import Room

SCRIPT = str(Path(__file__).with_name("faulty.py"))
MOMENTS = {
    # what the launcher has said by then
    "before": "",
    "start": r"isolation: ",
    "baseline": r"ranks on \d",
    "trial": r"trial 1/",
    "finals": r"final rounds: ",
    "hand-over": r"recipe written|not tuned|launching as written",
}
FROM_START = ("start", "baseline", "trial", "finals", "hand-over")
LAUNCHED, ENDED = "launched", "ended"
BOUND = 240.0  # seconds for a whole cell; without a fault it takes 15 to 40
_FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
_STUCK = ("--budget", "50s")
"""Where no step has been measured, a stuck rank is waited for up to half an hour, or until the budget is over."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    plant: Callable[[Room], None] = lambda room: None
    fault: str = ""
    """What the script does on SIGUSR1."""
    moments: Sequence[str] = FROM_START
    hosts: Sequence[int] = (1, 2)
    expected: str = LAUNCHED
    """How it must end: with the real job trained, or without one."""
    bound: float = BOUND
    prepare: Callable[[Room], Mapping[str, str]] = lambda room: {}
    """Before anything is launched; the launchers get these variables."""
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Moment → further words for autoddp."""
    code: int | None = None
    """The exit code of a launch that must end without a job."""
    says: str = ""
    """What one of the launchers must say, a regular expression."""
    needs: Callable[[], str] = lambda: ""
    """Why it cannot be tried on this machine."""


def signal_ranks(room: Room, number: int, *ranks: int) -> None:
    """To those ranks, as soon as they run and can take it; without ranks, to all."""
    until = time.monotonic() + 60
    while time.monotonic() < until and not room.ended:
        running = room.ranks(SCRIPT)
        if len(running) == 2 and (number != signal.SIGUSR1 or all(map(_catches, running.values()))):
            break
        time.sleep(0.02)
    for rank, pid in room.ranks(SCRIPT).items():
        if not ranks or rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _catches(pid: int) -> bool:
    """Whether the process has a handler for SIGUSR1, which would end it otherwise."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
        return bool(caught >> (signal.SIGUSR1 - 1) & 1)
    return False


def _set_off(*ranks: int) -> Callable[[Room], None]:
    return lambda room: signal_ranks(room, signal.SIGUSR1, *ranks)


def _kill(number: int, *ranks: int) -> Callable[[Room], None]:
    return lambda room: signal_ranks(room, number, *ranks)


def _limit_memory(room: Room) -> None:
    """Rank 1 may have little more than it has now; then it takes all it can get."""
    pid = room.ranks(SCRIPT).get(1)
    if pid is not None:
        with contextlib.suppress(OSError, ProcessLookupError):
            size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_AS, (size + (256 << 20), size + (256 << 20)))
    signal_ranks(room, signal.SIGUSR1, 1)


def _link_down(seconds: float | None) -> Callable[[Room], None]:
    """The second host's link; None: for good."""

    def plant(room: Room) -> None:
        assert room.lab is not None
        room.lab.link(1, "down")
        if seconds is not None:
            time.sleep(seconds)
            room.lab.link(1, "up")

    return plant


def _kill_launcher(host: int) -> Callable[[Room], None]:
    return lambda room: room.launches[host].process.kill()


def _interrupt(room: Room) -> None:
    for launch in room.launches:
        launch.process.send_signal(signal.SIGINT)


def _small_disk(room: Room) -> Mapping[str, str]:
    """For the run folders of host 0, in its mount namespace."""
    disk = room.work(0) / ".autoddp"
    disk.mkdir()
    room.mount(0, "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk))
    return {}


def _fill_disk(room: Room) -> None:
    """The run folders' disk takes nothing more."""
    assert room.lab is not None
    filler = room.work(0) / ".autoddp" / "filler"
    with contextlib.suppress(RuntimeError):
        room.lab.run(0, "dd", "if=/dev/zero", f"of={filler}", "bs=4096")


def _read_only_home(room: Room) -> None:
    for host in range(room.hosts):
        _make_read_only(room, host, room.home)


def _read_only_work(room: Room) -> None:
    """The working folders; what is written goes to the user's folder for state."""
    room.state = room.home / ".local" / "state" / "autoddp"
    for host in range(room.hosts):
        _make_read_only(room, host, room.work(host))


def _read_only_work_and_home(room: Room) -> None:
    """What is written goes to the temporary folder."""
    _read_only_home(room)
    _read_only_work(room)
    room.state = room.temporary / f"autoddp-of-user-{os.geteuid()}"


def _make_read_only(room: Room, host: int, folder: Path) -> None:
    room.mount(host, "--bind", str(folder), str(folder))
    room.mount(host, "-o", "remount,bind,ro", str(folder))


def _set_clock(seconds: int) -> Callable[[Room], None]:
    """The system's time as the launchers and all that they start are told it."""
    return lambda room: _write(room.folder / "clock", f"{seconds:+d}\n")


def _write(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def _needs_faketime() -> str:
    if unavailable() or not os.path.exists(_FAKETIME) or not shutil.which("cc"):
        return unavailable() or "needs libfaketime (Debian's faketime) and a C compiler"
    return ""


def own_clock(room: Room) -> dict[str, str]:
    """Variables under which all processes are told the system's time plus what the file `clock` says."""
    library = room.folder / "sleeping_on.so"
    source = Path(__file__).with_name("sleeping_on.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    clock = room.folder / "clock"
    if not clock.exists():
        clock.write_text("+0\n")
    return {"LD_PRELOAD": f"{library} {_FAKETIME}", "FAKETIME_TIMESTAMP_FILE": str(clock), **_CLOCK}


_CLOCK = {
    "FAKETIME_NO_CACHE": "1",
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # as with a clock that is set
    "NO_FAKE_STAT": "1",
}
_ELSEWHERE = r"current folder cannot be written: run folders go to .*; the recipe goes to "
_UNMEASURED = dict.fromkeys(("before", "start", "baseline"), _STUCK)
# A rank that does anything but wait for others is waited for until tuning must be over: else in five minutes.
_WORKING = {**_UNMEASURED, **dict.fromkeys(("trial", "finals"), ("--budget", "100s"))}
_STUCK_MOMENTS = ("start", "baseline", "trial", "finals")

KINDS: dict[str, Kind] = {
    "exception": Kind(_set_off(1), "exception"),
    "exception everywhere": Kind(_set_off(), "exception"),
    "abort": Kind(_set_off(1), "abort"),
    "kill rank 1": Kind(_kill(signal.SIGKILL, 1)),
    "kill rank 0": Kind(_kill(signal.SIGKILL, 0)),
    "kill all ranks": Kind(_kill(signal.SIGKILL)),
    "stop rank 1": Kind(_kill(signal.SIGSTOP, 1), moments=_STUCK_MOMENTS, options=_WORKING),
    "stuck in import": Kind(
        fault="stuck in import", moments=("before",), options=_UNMEASURED, says="the --budget of 50 s is over"
    ),
    "stuck in a collective": Kind(_set_off(1), "stuck in a collective", moments=_STUCK_MOMENTS, options=_UNMEASURED),
    "stuck in data loading": Kind(_set_off(1), "stuck in data loading", moments=_STUCK_MOMENTS, options=_WORKING),
    "not a number": Kind(_set_off(0), "nan", moments=("baseline", "trial", "finals")),
    "illegal configuration": Kind(fault="illegal", moments=("before",), says=r"trial \d/3 +failed"),
    "out of memory": Kind(_limit_memory, "memory"),
    "kill the launcher": Kind(_kill_launcher(-1), expected=ENDED, bound=200),
    "kill the first launcher": Kind(_kill_launcher(0), expected=ENDED, hosts=(2,), bound=120),
    "Ctrl-C": Kind(_interrupt, expected=ENDED, code=130),
    "link down for 10 s": Kind(_link_down(10), hosts=(2,), moments=("start", "baseline", "trial", "finals")),
    "link down for good": Kind(_link_down(None), hosts=(2,), expected=ENDED, bound=200),
    "disk full": Kind(
        _fill_disk,
        hosts=(1,),
        moments=("baseline", "trial", "finals", "hand-over"),
        prepare=_small_disk,
        needs=unavailable,
    ),
    "read-only home": Kind(_read_only_home, moments=("before",), needs=unavailable),
    "read-only working folder": Kind(_read_only_work, moments=("before",), needs=unavailable, says=_ELSEWHERE),
    "read-only working folder and home": Kind(
        _read_only_work_and_home, moments=("before",), needs=unavailable, says=_ELSEWHERE
    ),
    "clock an hour ahead": Kind(_set_clock(3600), prepare=own_clock, needs=_needs_faketime),
    "clock an hour back": Kind(_set_clock(-3600), prepare=own_clock, needs=_needs_faketime),
}
