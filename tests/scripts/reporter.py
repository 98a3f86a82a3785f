"""Leaves in OUT how this worker was started, says so on both streams, and ends as told. Starts fast: no torch."""

import argparse
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
START = os.environ["TORCHELASTIC_RESTART_COUNT"]
OUT = Path(os.environ["OUT"])


def report() -> None:
    """One file for each rank and restart; written whole, because others wait for it."""
    known = {
        "pid": os.getpid(),
        "argv": sys.argv,
        "command": sys.orig_argv,
        "name": __name__,
        "folder": os.getcwd(),
        "path": sys.path,
        "environ": dict(os.environ),
    }
    final = OUT / f"report{RANK}.{START}.json"
    final.with_suffix(".part").write_text(json.dumps(known))
    final.with_suffix(".part").rename(final)


def wait_until_alone() -> None:
    """Until all other ranks have ended: else it is chance whether the launcher stops one of them, and says so."""
    for rank in set(range(int(os.environ["WORLD_SIZE"]))) - {RANK}:
        file = OUT / f"report{rank}.{START}.json"
        while not file.exists():
            time.sleep(0.02)
        command = Path("/proc", str(json.loads(file.read_text())["pid"]), "cmdline")
        while command.exists() and command.read_bytes():  # a zombie's is empty
            time.sleep(0.02)


def wait_for_signal() -> None:
    """Until a signal comes; its number is left in OUT."""

    def handle(number: int, _: object) -> None:
        (OUT / f"signal{RANK}").write_text(str(number))
        sys.exit(0)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handle)
    report()
    while True:
        time.sleep(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait", action="store_true", help="until a signal comes")
    parser.add_argument("--exit", type=int, default=0, help="end rank 1 with this code")
    parser.add_argument("--kill", action="store_true", help="end rank 1 by SIGKILL")
    parser.add_argument("--restarts", type=int, default=0, help="fail on rank 1 until restarted so often")
    parser.add_argument("--then", help="a script beside this one to go on with")
    args, rest = parser.parse_known_args()
    if args.wait:
        wait_for_signal()
    report()
    print(f"rank {RANK} on stdout", flush=True)
    print(f"rank {RANK} on stderr", file=sys.stderr, flush=True)
    if args.then:
        sys.argv = [args.then, *rest]
        runpy.run_path(str(Path(__file__).with_name(args.then)), run_name="__main__")
    code = 1 if int(START) < args.restarts else args.exit
    if RANK == 1 and (code or args.kill):
        wait_until_alone()
        if args.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(code)


if __name__ == "__main__":
    main()
