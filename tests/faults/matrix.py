"""Faults of every kind, at every moment of a tuning job, on one host and on two.

    python tests/faults/matrix.py                    # all of it, about an hour: `make faults`
    python tests/faults/matrix.py exception abort    # some kinds
    python tests/faults/matrix.py --sample           # one cell of each kind

Each cell runs autoddp on a script of two ranks, waits for a moment, plants one fault, and looks at the end: the real
job has trained on all ranks, or the launch has ended as torchrun's would; within its bound; with nothing left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab import Lab, unavailable
from launchers import AUTODDP, Launch, start

SCRIPT = str(Path(__file__).with_name("faulty.py"))
MOMENTS = {
    # what the launcher has said by then
    "start": r"isolation: ",
    "baseline": r"ranks on \d",
    "trial": r"trial 1/",
    "finals": r"final rounds: ",
    "hand-over": r"recipe written|not tuned|launching as written",
}
LAUNCHED, ENDED = "launched", "ended"
BOUND = 240.0  # seconds for a whole cell; without a fault it takes 15 to 40


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    plant: Callable[[Room], None]
    fault: str = ""
    """What the script does on SIGUSR1."""
    moments: Sequence[str] = tuple(MOMENTS)
    hosts: Sequence[int] = (1, 2)
    expected: str = LAUNCHED
    """How it must end: with the real job trained, or without one."""
    in_the_job: bool = True
    """Whether, at the hand-over, the fault may meet the real job itself, which then ends as under torchrun."""
    bound: float = BOUND
    environment: dict[str, str] = field(default_factory=dict)
    needs: Callable[[], str] = lambda: ""
    """Why it cannot be tried on this machine."""


@dataclass
class Cell:
    """What came of one fault."""

    kind: str
    moment: str
    hosts: int
    outcome: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    said: str = ""


class Room:
    """One launch for each host, with a temporary folder of its own."""

    def __init__(self, kind: Kind, hosts: int, folder: Path, lab: Lab | None) -> None:
        self.kind, self.folder, self.lab = kind, folder, lab
        # a socket's path may not be long
        self.temporary = Path(tempfile.mkdtemp(prefix="f", dir="/tmp"))
        self.launches: list[Launch] = []
        for host in range(hosts):
            words = ["--trials", "3", "--allow", "exact"]
            popen = None
            if lab is None:
                words += ["--nproc-per-node", "2"]
            else:
                popen = functools.partial(lab.popen, host)
                words += ["--nnodes", str(hosts), "--nproc-per-node", "1", "--node-rank", str(host)]
                words += ["--master-addr", lab.address(0), "--master-port", "29411"]
            env = {
                "FAULT": kind.fault,
                "TMPDIR": str(self.temporary),
                "OMP_NUM_THREADS": "1",
                "TUNED_TIMES_LONGER": "100",
                "OUT": str(folder),
                **kind.environment,
            }
            self.launches.append(start(AUTODDP, folder / f"host{host}", [*words, SCRIPT], env, popen=popen))

    @property
    def said(self) -> str:
        return "".join(launch.stderr for launch in self.launches)

    def ranks(self) -> dict[int, int]:
        """Rank → process, of those that run now."""
        found = {}
        for launch in self.launches:
            for pid in launch.processes():
                with contextlib.suppress(OSError):
                    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    rank = next((e[5:] for e in environment if e.startswith(b"RANK=")), None)
                    if rank is not None and SCRIPT.encode() in words and b"-c" not in words:
                        found[int(rank)] = pid
        return found

    def signal(self, number: int, *ranks: int) -> None:
        """To those ranks, as soon as they run; without ranks, to all."""
        until = time.monotonic() + 60
        while len(running := self.ranks()) < 2 and time.monotonic() < until and not self.ended:
            time.sleep(0.02)
        for rank, pid in running.items():
            if not ranks or rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    @property
    def ended(self) -> bool:
        return all(launch.process.poll() is not None for launch in self.launches)

    def wait_for(self, moment: str) -> bool:
        """False if the launch has ended before."""
        while not re.search(MOMENTS[moment], self.launches[0].stderr):
            if self.ended or self.launches[0].process.poll() is not None:
                return False
            time.sleep(0.02)
        return True

    def links(self, state: str) -> None:
        """All hosts' links up or down."""
        assert self.lab is not None
        for host in range(len(self.lab)):
            self.lab.link(host, state)

    def left(self) -> list[str]:
        """What is still there that was not before."""
        found = []
        until = time.monotonic() + 10
        while (running := [p for launch in self.launches for p in launch.processes()]) and time.monotonic() < until:
            time.sleep(0.1)
        if running:
            found.append(f"{len(running)} processes")
            for launch in self.launches:
                launch.kill()
        places = [*self.temporary.iterdir(), *self.folder.glob("host*/.autoddp/*/autoddp-*")]
        found += [str(path) for path in places if not path.name.startswith(("torch", "pymp"))]
        own = f" {self.folder}/host0/.autoddp "  # the disk that fills up
        mounts = Path("/proc/self/mountinfo").read_text().replace(own, " ")
        found += [f"a mount below {self.folder}"] if str(self.folder) in mounts or str(self.temporary) in mounts else []
        return found

    def close(self) -> None:
        for launch in self.launches:
            if launch.process.poll() is None:
                launch.kill()
                launch.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


def _cgroup() -> str:
    controllers = Path("/sys/fs/cgroup/cgroup.controllers")
    if not controllers.exists() or "memory" not in controllers.read_text().split():
        return "needs cgroup v2 with its memory controller"
    return "" if os.access("/sys/fs/cgroup/cgroup.subtree_control", os.W_OK) else "needs a writable cgroup"


def _limit_memory(room: Room) -> None:
    """Rank 1 in a group of its own, which may have little more than it has now."""
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+memory")
    group = Path("/sys/fs/cgroup") / f"autoddp-{os.getpid()}"
    group.mkdir(exist_ok=True)
    pid = room.ranks().get(1)
    if pid is not None:
        (group / "memory.max").write_text(str(200 << 20))
        with contextlib.suppress(OSError):
            (group / "memory.swap.max").write_text("0")
        with contextlib.suppress(OSError):
            (group / "cgroup.procs").write_text(str(pid))
    room.signal(signal.SIGUSR1, 1)


def _link_down_for(seconds: float) -> Callable[[Room], None]:
    def plant(room: Room) -> None:
        room.links("down")
        if seconds:
            time.sleep(seconds)
            room.links("up")

    return plant


def _kill_launcher(room: Room) -> None:
    room.launches[-1].process.kill()


def _interrupt(room: Room) -> None:
    for launch in room.launches:
        launch.process.send_signal(signal.SIGINT)


def _fill_disk(room: Room) -> None:
    """The run folder's disk takes nothing more."""
    for launch in room.launches:
        with contextlib.suppress(OSError), open(launch.folder / ".autoddp" / "filler", "wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()


def _set_off(*ranks: int) -> Callable[[Room], None]:
    return lambda room: room.signal(signal.SIGUSR1, *ranks)


def _kill(number: int, *ranks: int) -> Callable[[Room], None]:
    return lambda room: room.signal(number, *ranks)


KINDS: dict[str, Kind] = {
    "exception": Kind(_set_off(1), "exception"),
    "exception everywhere": Kind(_set_off(), "exception"),
    "abort": Kind(_set_off(1), "abort"),
    "kill rank 1": Kind(_kill(signal.SIGKILL, 1)),
    "kill rank 0": Kind(_kill(signal.SIGKILL, 0)),
    "kill all ranks": Kind(_kill(signal.SIGKILL)),
    "stop rank 1": Kind(_kill(signal.SIGSTOP, 1), moments=("trial", "finals"), bound=300),
    "stuck": Kind(_set_off(1), "stuck", moments=("trial", "finals"), bound=300),
    "not a number": Kind(_set_off(0), "nan", moments=("baseline", "trial", "finals")),
    "out of memory": Kind(_limit_memory, "memory", hosts=(1,), needs=_cgroup),
    "kill the launcher": Kind(_kill_launcher, expected=ENDED, bound=300),
    "Ctrl-C": Kind(_interrupt, expected=ENDED),
    "link down for 10 s": Kind(_link_down_for(10), hosts=(2,), moments=("baseline", "trial", "finals")),
    "disk full": Kind(_fill_disk, hosts=(1,), moments=("baseline", "trial", "finals", "hand-over")),
}


def cells(kinds: Sequence[str], sample: bool) -> Iterator[Cell]:
    for name in kinds:
        kind = KINDS[name]
        found = [Cell(name, moment, hosts) for hosts in kind.hosts for moment in kind.moments]
        yield from (found[len(found) // 2 :][:1] if sample else found)


@contextlib.contextmanager
def _folder(kind: Kind) -> Iterator[Path]:
    """For the disk that fills up, a disk of its own."""
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/var/tmp") as place:
        folder = Path(place)
        if kind.plant is not _fill_disk:
            yield folder
            return
        disk = folder / "host0" / ".autoddp"
        disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def run(cell: Cell) -> Cell:
    """Plant the fault, and look at the end."""
    kind = KINDS[cell.kind]
    if why := kind.needs() or (unavailable() if cell.hosts > 1 else ""):
        cell.outcome = f"not tried: {why}"
        return cell
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder(kind))
        lab = stack.enter_context(Lab(hosts=cell.hosts)) if cell.hosts > 1 else None
        room = Room(kind, cell.hosts, folder, lab)
        stack.callback(room.close)
        began = time.monotonic()
        if not room.wait_for(cell.moment):
            cell.problems.append(f"it ended before the moment came: {room.said[-1500:]}")
            return cell
        kind.plant(room)
        while not room.ended and time.monotonic() - began < kind.bound:
            time.sleep(0.1)
        cell.seconds = round(time.monotonic() - began, 1)
        _judge(cell, kind, room)
    return cell


def _judge(cell: Cell, kind: Kind, room: Room) -> None:
    trained = sum((room.folder / f"rank{rank}.pt").exists() for rank in range(2)) == 2
    codes = [launch.process.poll() for launch in room.launches]
    cell.outcome = LAUNCHED if trained else ENDED
    cell.said = room.said[-3000:]
    if not room.ended:
        cell.problems.append(f"not ended after {kind.bound:.0f} s: {codes}")
    met_the_job = cell.moment == "hand-over" and kind.in_the_job and cell.outcome == ENDED and any(codes)
    if kind.expected == LAUNCHED and not met_the_job and (not trained or any(codes)):
        cell.problems.append(f"no job was launched, or it failed: {codes}")
    if cell.kind == "Ctrl-C" and cell.moment != "hand-over" and set(codes) - {130, -2}:
        cell.problems.append(f"exit codes {codes}, not 130")
    if re.search(r"^Traceback", room.said, re.MULTILINE) and cell.moment != "hand-over":
        cell.problems.append("a traceback was printed")
    cell.problems += room.left()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=[], help=f"some of: {', '.join(KINDS)}")
    parser.add_argument("--sample", action="store_true", help="one cell of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all cells as JSON")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    found = []
    print(f"{'fault':22} {'moment':10} hosts  {'ended as':9} {'seconds':>7}", flush=True)
    for cell in cells(options.kinds or list(KINDS), options.sample):
        run(cell)
        found.append(cell)
        problems = "; ".join(cell.problems).splitlines()
        print(
            f"{cell.kind:22} {cell.moment:10} {cell.hosts:5}  {cell.outcome:9} {cell.seconds:7.1f}  "
            f"{problems[0] if problems else ''}",
            flush=True,
        )
    tried = [cell for cell in found if not cell.outcome.startswith("not tried")]
    good = [cell for cell in tried if not cell.problems]
    print(f"{len(good)} of {len(tried)} cells ended as they must; {len(found) - len(tried)} could not be tried here")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(cell) for cell in found], indent=1))
    sys.exit(len(good) != len(tried))


if __name__ == "__main__":
    main()
