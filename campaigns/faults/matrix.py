"""Faults of every kind, at every moment of a tuning job, on one host and on two.

    python campaigns/faults/matrix.py                    # all of it, one or two hours: `make faults`
    python campaigns/faults/matrix.py exception abort    # some kinds
    python campaigns/faults/matrix.py --sample           # one cell of each kind

Each cell runs autoddp on a script of two ranks, waits for a moment, plants one fault, and looks at the end: the real
job has trained on all ranks, or the launch has ended as torchrun's would; within its bound; with nothing left behind.
A fault that meets the real job itself, as one at the hand-over may, ends it as under torchrun.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("campaigns", "tests"))

from lab import unavailable

from faults.cells import NOT_TRIED, Result, add_options, commit, count, read, run_all, table
from faults.kinds import ENDED, KINDS, LAUNCHED, MOMENTS, SCRIPT, Kind
from faults.rooms import Room

_PORT = "29411"


def cells(kinds: Sequence[str], sample: bool = False) -> Iterator[Result]:
    """All cells of these kinds, not yet run; or one of each, from the middle."""
    for name in kinds:
        kind = KINDS[name]
        found = [
            Result(f"{name} | {moment} | {hosts}", f"{name}, {hosts} host{'s' * (hosts > 1)}", moment, kind.bound)
            for hosts in kind.hosts
            for moment in kind.moments
        ]
        yield from (found[len(found) // 2 :][:1] if sample else found)


def run(cell: Result) -> None:
    """Plant the fault, and look at the end."""
    name, moment, hosts = cell.name.split(" | ")
    kind = KINDS[name]
    if why := kind.needs() or (unavailable() if hosts == "2" else ""):
        cell.outcome = f"{NOT_TRIED}: {why}"
        return
    with Room(int(hosts)) as room:
        variables = kind.prepare(room)
        if moment == "before":
            kind.plant(room)
        began = time.monotonic()
        _launch(kind, moment, room, variables)
        if moment != "before":
            if not room.wait_for_said(MOMENTS[moment], kind.bound):
                cell.problems.append(f"the moment did not come: {room.said[-1500:]}")
                return
            kind.plant(room)
        planted = time.monotonic()
        room.wait(kind.bound - (planted - began))
        cell.seconds = round(time.monotonic() - began, 1)
        cell.figures = {"after the fault": round(time.monotonic() - planted, 1), "codes": room.codes}
        _judge(cell, kind, moment, room)


def _launch(kind: Kind, moment: str, room: Room, variables: Mapping[str, str]) -> None:
    words = ["--trials", "3", "--allow", "exact", *kind.options.get(moment, ())]
    env = {"FAULT": kind.fault, "TUNED_TIMES_LONGER": "100", **variables}
    for host in range(room.hosts):
        where = ["--nproc-per-node", "2"]
        if room.hosts > 1:
            assert room.lab is not None
            where = ["--nnodes", str(room.hosts), "--nproc-per-node", "1", "--node-rank", str(host)]
            where += ["--master-addr", room.lab.address(0), "--master-port", _PORT]
        room.launch([*words, *where, SCRIPT], env, host)


def _judge(cell: Result, kind: Kind, moment: str, room: Room) -> None:
    trained = all((room.folder / f"rank{rank}.pt").exists() for rank in range(2))
    codes = room.codes
    cell.outcome = LAUNCHED if trained else ENDED
    cell.said = room.said[-4000:]
    if not room.ended:
        cell.problems.append(f"not ended after {kind.bound:.0f} s: {codes}")
    met_the_job = moment == "hand-over" and not trained and any(codes)
    if kind.expected == LAUNCHED and not met_the_job and (not trained or any(codes)):
        cell.problems.append(f"no job was launched, or it failed: {codes}")
    if kind.expected == ENDED and trained and moment != "hand-over":
        cell.problems.append(f"a job was launched: {codes}")
    if kind.code is not None and moment != "hand-over" and set(codes) != {kind.code}:
        cell.problems.append(f"exit codes {codes}, not {kind.code}")
    if kind.says and not re.search(kind.says, room.said):
        cell.problems.append(f"nobody has said {kind.says}")
    if re.search(r"^Traceback", room.said, re.MULTILINE) and moment != "hand-over":
        cell.problems.append("a traceback was printed")
    if room.state is not None and len(list(room.state.glob("*/*.autoddp.toml"))) != int(room.hosts):
        cell.problems.append(f"not one recipe for each host in {room.state}")
    cell.problems += room.left()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=[], help=f"some of: {', '.join(KINDS)}")
    parser.add_argument("--sample", action="store_true", help="one cell of each kind")
    add_options(parser)
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    if options.show:
        found = read(options.show)
        print(f"commits: {', '.join(dict.fromkeys(result.commit for result in found))}")
    else:
        print(f"commit {commit()}", flush=True)
        found = run_all(list(cells(options.kinds or list(KINDS), options.sample)), run, options)
    good, tried = count(found)
    print(table(found))
    print(f"{good} of {tried} cells ended as they must; {len(found) - tried} could not be tried here")
    sys.exit(good != tried)


if __name__ == "__main__":
    main()
