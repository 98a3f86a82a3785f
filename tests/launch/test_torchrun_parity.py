"""What a worker finds when it starts: argv, folder, import path, environment. As under torchrun, to the letter."""

import json
import sys

import pytest
from launchers import REPORTER, SCRIPTS, SIDES, side_by_side, whole

TWO = ["--nproc-per-node", "2"]
# Whatever differs between two launches of torchrun itself; the rest must be equal.
OWN_TO_A_LAUNCH = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
SCRIPT_ARGUMENTS = ["first", "--second=2", "-x", "--nproc-per-node", "5", "", "two words"]


# name: launcher's and script's words, more environment, how many workers
WAYS = {
    "script": ([*TWO, REPORTER, *SCRIPT_ARGUMENTS], {}, 2),
    "separator": ([REPORTER, "--before", "--", "--after"], {"OMP_NUM_THREADS": "3"}, 1),
    "module": ([*TWO, "-m", "reporter", "a"], {"PYTHONPATH": f"{SCRIPTS.parents[1]}:{SCRIPTS}"}, 2),
    "no_python": ([*TWO, "--no-python", sys.executable, "-B", REPORTER, "a"], {}, 2),
    "run_path": ([*TWO, "--run-path", REPORTER, "a"], {}, 2),
    "standalone": (["--standalone", "--nproc_per_node=2", "--role", "trainer", REPORTER], {}, 2),
    "static": ([*TWO, "--master-port", "{port}", "--rdzv-id", "job7", "--max-restarts=3", REPORTER], {}, 2),
    "variables": (
        [REPORTER, *SCRIPT_ARGUMENTS],
        {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "trainer", "PET_STANDALONE": "1"},
        2,
    ),
    "abbreviated": (["--nproc-per", "2", "--stand", "--virtual-local-rank", REPORTER], {}, 2),
}


SHORT = {"no_python", "static", "variables"}


@pytest.fixture(scope="module", params=[name if name in SHORT else whole(name) for name in WAYS])
def way(request, tmp_path_factory):
    words, env, workers = WAYS[request.param]
    return side_by_side(tmp_path_factory.mktemp(request.param), words, env), workers


def comparable(launch):
    """The reports without what differs between any two launches, keys of the environment kept."""
    reports = json.loads(launch.anonymous(json.dumps(launch.reports())))
    for report in reports.values():
        del report["pid"]
        assert report["environ"].keys() >= OWN_TO_A_LAUNCH
        report["environ"].update(dict.fromkeys(OWN_TO_A_LAUNCH, "masked"))
    return reports


def test_worker_is_started_as_under_torchrun(way):
    both, workers = way
    assert {side: launch.returncode for side, launch in both.items()} == dict.fromkeys(SIDES, 0)
    assert list(both["torchrun"].reports()) == [f"report{rank}.0.json" for rank in range(workers)]
    assert comparable(both["autoddp"]) == comparable(both["torchrun"])


def test_nothing_is_left(way):
    both, _ = way
    files = {side: sorted(path.name for path in launch.folder.iterdir()) for side, launch in both.items()}
    assert files["autoddp"] == files["torchrun"]
    assert {side: launch.processes() for side, launch in both.items()} == {side: [] for side in SIDES}
