"""Launches with every pair of rendezvous options: each says a line within ten seconds, or ends; none has a traceback.

    python campaigns/rendezvous.py --page campaigns/rendezvous.md      # some minutes, two launches at once

What the options mean is compared with torchrun in `tests/launch/test_rendezvous_options.py`, in all combinations and
without a launch. Here real launchers wait, on this host alone, for hosts that do not come. Each is given SIGINT once it
has said what it waits for. The ten seconds count from the moment at which torchrun would begin: importing torch takes
as long under both, and is measured before each launch.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "tests" / "recipe" / "sound.autoddp.toml"
WITHIN = 10.0  # seconds until a line or the end
MOST = 24  # launches
ENDS = 60.0  # seconds in which a launcher must end after SIGINT
OPTIONS: dict[str, tuple[str, ...]] = {
    "--nnodes": ("2", "1:2", "2:3"),
    "--rdzv-backend": ("c10d", "static", "etcd", "bogus"),
    "--rdzv-endpoint": (
        "",
        "127.0.0.1:{port}",
        "localhost",
        "no-such-host.invalid:29400",
        "localhost:0",
        "[::1]:{port}",
    ),
    "--rdzv-conf": ("", "is_host=0", "read_timeout=x", "store_type=file"),
    "does": ("recipe", "tune", "bench"),
}
_NOT_AWAITED = re.compile(r"autoddp: (recipe |isolation: |tuning |\d+ ranks? on this host|.* is taken as)")
"""Lines that do not say what is waited for."""


@dataclass(frozen=True)
class Launch:
    """One launch and what came of it."""

    chosen: dict[str, str]
    seconds: float
    """Until the line that says what is waited for, or the end."""
    line: str
    ended: int | None
    """The exit code, if it ended by itself."""
    faults: tuple[str, ...]


def pairwise() -> list[dict[str, str]]:
    """Few combinations, in which every two values of two different options stand together in at least one."""
    names = list(OPTIONS)
    pairs = {
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(OPTIONS[a], OPTIONS[b])
    }
    everything = [dict(zip(names, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    chosen = []
    while pairs:
        best = max(everything, key=lambda one: len(pairs & pairs_of(one)))
        pairs -= pairs_of(best)
        chosen.append(best)
    return chosen


def pairs_of(one: dict[str, str]) -> set[frozenset[tuple[str, str]]]:
    """The pairs of values that stand together in one combination."""
    return {frozenset(pair) for pair in itertools.combinations(one.items(), 2)}


def words_of(chosen: dict[str, str]) -> list[str]:
    """The command's words."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    options = [
        word
        for name, value in chosen.items()
        if name.startswith("--") and value
        for word in (name, value.replace("{port}", port))
    ]
    what = {
        "recipe": ["--recipe", str(RECIPE), "--force", *options, "train.py"],
        "tune": ["--trials", "2", *options, "train.py"],
        "bench": ["bench", *options],
    }
    return what[chosen["does"]]


def run(chosen: dict[str, str]) -> Launch:
    """One launch, to its end."""
    before = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch.distributed.run"], check=True)
    importing = time.monotonic() - before
    folder = Path(tempfile.mkdtemp(prefix="autoddp-rendezvous-"))
    (folder / "train.py").write_text("raise SystemExit('this must not run')\n")
    command = [sys.executable, "-m", "autoddp", *words_of(chosen)]
    began = time.monotonic()
    with open(folder / "stderr", "w") as stderr:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        line, seconds, ended = "", 0.0, None
        while not line and ended is None and seconds < 3 * WITHIN + importing:
            time.sleep(0.05)
            ended, seconds = process.poll(), time.monotonic() - began
            said = (folder / "stderr").read_text().splitlines()
            line = next((one for one in said if one.startswith("autoddp: ") and not _NOT_AWAITED.match(one)), "")
        if line.startswith("autoddp: error: "):
            ended = process.wait(ENDS)
        elif ended is None:
            process.send_signal(signal.SIGINT)
        faults = []
        try:
            process.wait(ENDS)
        except subprocess.TimeoutExpired:
            faults.append(f"no end {ENDS:.0f} s after SIGINT")
        text = (folder / "stderr").read_text()
        seconds = max(0.0, seconds - importing)
        faults += ["a traceback"] if "Traceback" in text else []
        faults += [] if seconds <= WITHIN else [f"no line within {WITHIN:.0f} s"]
        shown = line or next(iter(text.splitlines()), "")
        return Launch(chosen, seconds, shown, ended, tuple(faults))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def page_of(launches: list[Launch]) -> str:
    """The last results as a page."""
    wrong = sum(bool(one.faults) for one in launches)
    rows = [
        f"| {' '.join(f'{name} {value}' for name, value in one.chosen.items() if value and name != 'does')} "
        f"| {one.chosen['does']} | {one.seconds:.1f} | {'waits' if one.ended is None else f'exit code {one.ended}'} "
        f"| {shown(one.line)}{''.join(f' **{fault}**' for fault in one.faults)} |"
        for one in launches
    ]
    return "\n".join(
        [
            "# Rendezvous options, in pairs",
            "",
            f"`python campaigns/rendezvous.py` on {time.strftime('%Y-%m-%d')}, Python {platform.python_version()}: "
            f"{len(launches)} launches, {wrong} at fault.",
            "The seconds are until the line, without those in which torch is imported.",
            "",
            "| options | does | seconds | then | first line |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def shown(line: str) -> str:
    """A line for a table: without this host's name, and cut."""
    text = line.removeprefix("autoddp: ").replace(socket.gethostname(), "HOST").replace("|", "\\|")
    text = re.sub(r":\d{5}\b", ":PORT", text)
    return text if len(text) <= 160 else f"{text[:157]}…"


def main() -> int:
    """The exit code: 1 if a launch was at fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="write the results to this file")
    parser.add_argument("--at-once", type=int, default=2)
    arguments = parser.parse_args()
    chosen = pairwise()
    assert len(chosen) <= MOST, len(chosen)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        launches = list(pool.map(run, chosen))
    page = page_of(launches)
    if arguments.page:
        arguments.page.write_text(page, encoding="utf-8")
    print(page)
    return int(any(one.faults for one in launches))


if __name__ == "__main__":
    sys.exit(main())
