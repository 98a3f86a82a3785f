"""While a job is tuned: what listens on the host, and what another user of the machine can see of it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
from launchers import BRIEF, FROM_NOTHING, SCRIPTS, start, wait_for
from listeners import Watch, listeners
from other_user import as_another_user, needs_root

from autoddp.recipe import load

SCRIPT = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
sys.argv = sys.argv[:1]
import runpy
runpy.run_path({str(SCRIPTS / "plain.py")!r}, run_name="__main__")
"""
HOSTILE = "$(touch owned).[red]x[link=a]<script>\x1b[2J\n;touch owned;.py"
PROBE = """
import socket, sys
for address, port in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        socket.create_connection((address, int(port)), timeout=5).close()
        print("open")
    except OSError:
        print("closed")
"""


def walked(top: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for folder, names, files in os.walk(top):
        for name in (*names, *files):
            with contextlib.suppress(OSError):
                yield Path(folder, name), os.lstat(Path(folder, name))


@pytest.mark.lab
@needs_root
def test_nobody_gets_in(lab, open_folder):
    """One tuning of a script with a hostile name, in a network namespace, looked at from all sides."""
    hosts = lab(hosts=1)
    folder = open_folder / "job"
    folder.mkdir(mode=0o755)
    (folder / HOSTILE).write_text(SCRIPT)
    words = ["--nproc-per-node", "2", "--trials", "2", "--diagnose-budget", "1s", "--tune-only", "--allow", "exact"]
    words += [HOSTILE, "--token", "hunter2"]
    variables = {"OMP_NUM_THREADS": "1", "TUNED_TIMES_LONGER": "1000", "MY_SECRET": "hunter3"}

    def popen(argv, **options):
        """On the host, and without GLOO_SOCKET_IFNAME, which a lab sets."""
        if FROM_NOTHING in os.environ:
            return hosts.popen(0, ["env", "-u", "GLOO_SOCKET_IFNAME", *argv], **options)
        return forks.popen(argv[1:], host=hosts.holder(0), **options)

    with Watch(hosts.holder(0)) as seen:
        launch = start(BRIEF, folder, words, variables, popen=popen)
        try:
            wait_for(
                lambda: list(folder.glob(".autoddp/2*/journal.jsonl")) or launch.process.poll() is not None, "a trial"
            )
            assert launch.process.poll() is None, launch.stderr
            (run,) = folder.glob(".autoddp/2*/")
            unix = Path(f"/proc/{hosts.holder(0)}/net/unix")
            sockets = [path for line in unix.read_text().splitlines() if (path := line.split()[-1])]
            ours = [path for path in sockets if path.endswith("/s") and "/autoddp-" in path]
            open_ = listeners(hosts.holder(0))

            def intrudes():
                """What another user reads, lists or reaches."""
                got = []
                with contextlib.suppress(OSError):
                    got += os.listdir(run)
                for place, _ in walked(folder):
                    with contextlib.suppress(OSError):
                        if place.is_file() and place.name != HOSTILE:
                            place.read_bytes()
                            got.append(str(place))
                for path in ours:
                    with contextlib.suppress(OSError):
                        socket.socket(socket.AF_UNIX).connect(path)
                        got.append(path)
                return got

            assert as_another_user(intrudes) == []
            assert ours
            addresses = [word for one in open_ for word in (hosts.address(0), str(one.port))]
            scanned = subprocess.run(
                [*hosts._enter(0), sys.executable, "-c", PROBE, *addresses], capture_output=True, text=True, check=True
            )
            assert set(scanned.stdout.split()) == {"closed"}  # from eth0's address nothing is to be reached
        finally:
            launch.wait()
    assert launch.returncode == 0, launch.stderr
    assert seen.found
    assert [one for one in seen.found if not one.only_here] == []
    assert len(seen.found) == 3, seen.found  # torch's store for the ranks, and one of Gloo for each of two ranks
    # What a name holds is shown, and does nothing.
    assert not list(open_folder.rglob("owned"))
    assert "\x1b" not in launch.stderr
    assert "$(touch owned).[red]x[link=a]<script>\\x1b[2J\\n;touch owned;.py" in launch.stderr
    assert "hunter2" not in launch.stderr
    # What stays is private but for the recipe, and has no secret.
    (recipe,) = folder.glob("*.autoddp.toml")
    assert stat.S_IMODE(recipe.stat().st_mode) == 0o666 & ~_umask()
    assert load(recipe).configuration is not None
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    private = ("journal.jsonl", "tuning.log", "summary.json", "report.html", "owner.json", "elastic.log")
    modes = {path.name: stat.S_IMODE(found.st_mode) for path, found in walked(run) if path.name in private}
    assert modes == dict.fromkeys(private, 0o600)
    for path, found in walked(folder):
        if stat.S_ISREG(found.st_mode):
            assert not any(word in path.read_bytes() for word in (b"hunter2", b"hunter3")), path


def _umask():
    now = os.umask(0o022)
    os.umask(now)
    return now
