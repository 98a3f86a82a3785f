"""`--objective` on two hosts: they make each start together, and come to one answer.

Most scripts here import no torch, so a start of them costs next to nothing.
"""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launchers import AUTODDP, PATIENCE, Launch, start, wait_for

from autoddp.commandline.mode import choose
from autoddp.commandline.words import parse
from autoddp.recipe import load

pytestmark = pytest.mark.lab
RATE = "regex:max:rate ([0-9.]+)"
THREADS = "import os, sys, time\nrank, few = os.environ['RANK'], os.environ.get('OMP_NUM_THREADS') == '1'\n"
"""One CPU thread is the one setting that is tried on any machine with two cores."""


def words_of(lab: Any, host: int, *words: str, ranks: Sequence[int] = (1, 1)) -> list[str]:
    static = ["--node-rank", str(host), "--master-addr", lab.address(0), "--master-port", "29411"]
    return ["--nnodes", "2", "--nproc-per-node", str(ranks[host]), *static, *words]


def begun(lab: Any, parent: Path, code: str, *words: str, ranks: Sequence[int] = (1, 1)) -> list[Launch]:
    """The same command on both hosts."""
    (parent / "job.py").write_text(THREADS + code)
    return [
        start(
            AUTODDP,
            parent / f"host{host}",
            words_of(lab, host, *words, str(parent / "job.py"), ranks=ranks),
            {"GLOO_SOCKET_IFNAME": "eth0"},
            popen=functools.partial(lab.fork, host),
        )
        for host in range(2)
    ]


def done(launches: list[Launch]) -> list[Any]:
    """Their summaries, once both have ended well."""
    assert [launch.wait().returncode for launch in launches] == [0, 0], launches[0].stderr[-3000:]
    return [json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text()) for launch in launches]


def journal_of(launch: Launch) -> list[str]:
    """The lines of the newest run's journal."""
    newest = max(launch.folder.glob(".autoddp/2*/journal.jsonl"), default=None)
    return newest.read_text().splitlines() if newest is not None else []


def killed(launches: list[Launch]) -> list[str]:
    """The lines of the first host's journal, of launchers that were killed after their third start."""
    try:
        wait_for(lambda: len(journal_of(launches[0])) > 3, "the third start")
    finally:
        for launch in launches:
            launch.kill()
    for launch in launches:
        wait_for(lambda launch=launch: not launch.processes(), "the end of every process")
    return journal_of(launches[0])


def test_a_number_that_only_the_second_host_prints(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first host's rank does meanwhile is none of its own, and no start leaves anything on either.

    The launchers are killed, and the next ones go on with what these have measured.
    """
    code = "open('log', 'a').write('x')\nif rank == '1':\n    print('rate', 20 if few else 10, flush=True)\n"
    hosts, words = lab(hosts=2), ("--objective", RATE, "--trials", "1")
    known = killed(begun(hosts, tmp_path, code, *words))
    launches = begun(hosts, tmp_path, code, *words)
    first, second = done(launches)
    assert f"cut off after {len(known) - 1} measurements; --fresh begins anew" in launches[0].stderr
    journal = journal_of(launches[0])
    assert journal[: len(known)] == known
    made = len(list(max(launches[1].folder.glob(".autoddp/2*")).glob("attempt*")))
    assert made == len(journal) - len(known) + 1, "starts that were known, or one that is missing"
    assert first["objective"] == second["objective"]
    assert (first["objective"]["as_written"], first["objective"]["tuned"]) == (10, 20)
    recipes = [next(launch.folder.glob("*.toml")) for launch in launches]
    assert recipes[0].read_text() == recipes[1].read_text()
    recipe = load(recipes[0])
    assert recipe.env == {"OMP_NUM_THREADS": "1"}
    assert (recipe.fits.nodes, recipe.fits.world_size, recipe.evidence.objective) == (2, 2, RATE)
    for launch in launches:
        assert (launch.folder / "log").read_text() == "x", "files of a start, or no job"
        # torchrun itself shows one at the end of the job, where the other host's launcher has ended first.
        assert "Traceback" not in launch.stderr.partition("starting the job")[0]
    assert "leads tuning: its lines tell how it goes" in launches[1].stderr
    monkeypatch.chdir(launches[0].folder)
    again = choose(parse(words_of(hosts, 0, str(tmp_path / "job.py"))))
    assert (again.tune, again.variables) == (False, recipe.env)


@pytest.mark.whole
def test_steps_of_real_ranks_over_the_link(lab: Any, tmp_path: Path) -> None:
    """The setting helps the rank of one host, and all steps wait for it."""
    code = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(14):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01 if few or rank == "0" else 0.1)
dist.barrier()
"""
    first, second = done(begun(lab(hosts=2), tmp_path, code, "--objective", "steps", "--trials", "1"))
    assert first["objective"] == second["objective"]
    assert first["objective"]["as_written"] >= 0.1 > first["objective"]["tuned"]


def test_hosts_with_different_numbers_of_ranks(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe was one for as many on each host as the first one has, which fitted none of them."""
    code = "if rank == '0':\n    print('rate 10', flush=True)\n"  # nothing gains, so there are no final rounds
    hosts, ranks = lab(hosts=2), (1, 2)
    launches = begun(hosts, tmp_path, code, "--objective", RATE, "--trials", "1", "--tune-only", ranks=ranks)
    done(launches)
    for host, launch in enumerate(launches):
        recipe = load(next(launch.folder.glob("*.toml")))
        assert (recipe.fits.nodes, recipe.fits.world_size, recipe.fits.ranks_of_nodes) == (2, 3, (1, 2))
        monkeypatch.chdir(launch.folder)
        again = choose(parse(words_of(hosts, host, str(tmp_path / "job.py"), ranks=ranks)))
        assert (again.tune, again.recipe, again.variables) == (False, recipe, {})


def test_a_setting_that_one_host_fails_with(lab: Any, tmp_path: Path) -> None:
    """The other host's part ends with it, and the reason that is told is that of the host which failed."""
    code = """
if few and rank == "1":
    sys.exit("no memory here")
print("rate 5", flush=True)
time.sleep(600 if few else 0)
"""
    launches = begun(lab(hosts=2), tmp_path, code, "--objective", RATE, "--trials", "1")
    for summary in done(launches):
        as_written, tried = summary["objective"]["starts"]
        assert as_written["numbers"] == [5]
        assert (tried["state"], tried["numbers"]) == ("failed", [])
        assert "rank 1" in tried["reason"]
        assert not summary["decision"]["configuration"]
    for launch in launches:
        assert launch.processes() == []


def test_a_signal_on_one_host_ends_both(lab: Any, tmp_path: Path) -> None:
    launches = begun(lab(hosts=2), tmp_path, "print('here', flush=True)\ntime.sleep(600)\n", "--objective", RATE)
    try:
        logs = ".autoddp/2*/attempt0/*/attempt_0/0/stdout.log"
        for launch in launches:
            folder = launch.folder
            wait_for(lambda folder=folder: any("here" in log.read_text() for log in folder.glob(logs)), "its start")
        launches[1].process.send_signal(signal.SIGINT)
        for launch in launches:
            launch.process.wait(PATIENCE)
    finally:
        for launch in launches:
            launch.kill()
    assert launches[0].returncode == 1
    assert "SIGINT" in launches[0].stderr
    for launch in launches:
        assert launch.processes() == []
        assert not list(launch.folder.glob("*.toml"))
        assert "Traceback" not in launch.stderr


@pytest.mark.whole
def test_a_model_that_only_the_second_host_builds_is_sent_to_the_usual_way(lab: Any, tmp_path: Path) -> None:
    """The first host's part, which would go on for minutes, ends with it."""
    code = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
alone = dist.new_group([1])
if rank == "1":
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=alone)
time.sleep(600)
"""
    launches = begun(lab(hosts=2), tmp_path, code, "--objective", "steps")
    for launch in launches:
        assert launch.wait().returncode == 2, launch.stderr[-3000:]
        assert "builds a DistributedDataParallel model" in launch.stderr.strip().splitlines()[-1]
        assert launch.processes() == []
