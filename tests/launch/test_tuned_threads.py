"""The number of CPU threads: tried live, written to [env], given to the launched job; pinned by whoever sets it."""

from __future__ import annotations

import json
import os

import pytest
import torch
from launchers import AUTODDP, REPORTER, SCRIPTS, start

from autoddp.commandline.environment import job_environment
from autoddp.commandline.mode import choose
from autoddp.commandline.words import parse
from autoddp.knobs import Configuration
from autoddp.network.own_network import Network
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, load, save

PLAIN = str(SCRIPTS / "plain.py")
CPUS = len(os.sched_getaffinity(0))


def tuned(folder, *words, **variables):
    """One rank on each of two nodes of this machine, so that each believes it has all cores."""
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "threads"]
    meet += ["--rdzv-endpoint", "127.0.0.1:29437", "--local-addr", "127.0.0.1"]
    # Threads that spin for each other would take the cores from the other rank.
    passive = {"OMP_WAIT_POLICY": "PASSIVE"}
    variables = {"TUNED_TIMES_LONGER": "1000", "GLOO_SOCKET_IFNAME": "lo", **passive, **variables}
    launches = [start(AUTODDP, folder / f"node{n}", [*meet, *words], variables) for n in range(2)]
    for launch in launches:
        assert launch.wait().returncode == 0, launch.stderr[-2000:]
    return launches[0]


def summary_of(launch):
    return json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text())


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Tuned with the number of threads left open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        return tuned(tmp_path_factory.mktemp("tuned"), "--trials", "4", "--tune-only", PLAIN)


@pytest.mark.skipif(CPUS < 2, reason="needs two cores")
@pytest.mark.whole
def test_threads_are_tried_first(launch):
    study = summary_of(launch)
    assert study["job"]["thread_counts"][0] == 1
    assert study["trials"][0]["configuration"] == {"threads": 1}
    chosen = study["decision"]["configuration"].get("threads")
    recipe = load(launch.folder / "scripts.plain.autoddp.toml")
    assert recipe.env == ({} if chosen is None else {"OMP_NUM_THREADS": str(chosen)})
    assert "threads" not in recipe.configuration


@pytest.mark.whole
def test_a_number_that_the_user_set_is_pinned(tmp_path):
    launch = tuned(tmp_path, "--trials", "4", "--tune-only", PLAIN, OMP_NUM_THREADS="1")
    study = summary_of(launch)
    assert study["job"]["left_out"]["threads"] == "OMP_NUM_THREADS is set"
    assert all("threads" not in trial["configuration"] for trial in study["trials"])


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A launch by a recipe with three threads, where the user has set none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    version = torch.__version__.split("+")[0]
    fits = Fits(2, 1, "gloo", ("cpu",), version, 288, "0123456789abcdef")
    made_by = MadeBy("0.1.0", version, "3.11.7", "2026-01-01T00:00:00Z")
    evidence = Evidence(31.0, 0.1, 20, 6, 100, "for a test")
    save(Recipe(made_by, fits, Configuration(), evidence, env={"OMP_NUM_THREADS": "3"}), tmp_path / "recipe.toml")
    return ["--nproc-per-node", "2", "--recipe", str(tmp_path / "recipe.toml"), REPORTER]


def test_the_launched_job_gets_it(tmp_path, words):
    launch = start(AUTODDP, tmp_path / "job", words, {}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    reports = [json.loads(path.read_text()) for path in launch.folder.glob("report*.json")]
    assert [report["environ"]["OMP_NUM_THREADS"] for report in reports] == ["3"] * 2
    assert "is set here and stays" not in launch.stderr


def test_a_users_own_number_stays(words, monkeypatch, capsys):
    """The job inherits it: the launch adds no variable of that name."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    options = parse(words)
    mode = choose(options)
    assert mode.says.endswith("recipe.toml: launching as written")
    assert "OMP_NUM_THREADS" not in job_environment(options, mode, Network())
    assert "OMP_NUM_THREADS=2 is set here and stays" in capsys.readouterr().err


def test_numpy_keeps_the_threads_that_it_had_in_the_trials(words, monkeypatch):
    """torchrun gives each of several ranks one, and trials change torch's number alone."""
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: True)
    options = parse(words)
    found = job_environment(options, choose(options), Network())
    assert (found["OMP_NUM_THREADS"], found["OPENBLAS_NUM_THREADS"]) == ("3", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")  # the user's own
    assert "OPENBLAS_NUM_THREADS" not in job_environment(options, choose(options), Network())
