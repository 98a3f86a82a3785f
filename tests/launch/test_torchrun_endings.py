"""How a job ends: exit code, failure summary, error file, restarts, and nobody left behind."""

import re

import pytest
from launchers import REPORTER, SCRIPTS, SIDES, side_by_side, whole

TWO = ["--nproc-per-node", "2"]
# name: words, exit code of torchrun, what its summary says of the root cause (None: there is no summary)
ENDINGS = {
    "success": ([*TWO, REPORTER], 0, None),
    "exit_1": ([*TWO, REPORTER, "--exit", "1"], 1, "exitcode  : 1 "),
    "exit_7": (["--nproc-per-node", "3", REPORTER, "--exit", "7"], 1, "exitcode  : 7 "),
    "killed": ([*TWO, REPORTER, "--kill"], 1, "exitcode  : -9 "),
    "recorded": ([*TWO, str(SCRIPTS / "recorded_failure.py")], 1, "RuntimeError: planted: rank 1 cannot go on"),
    "restarted": ([*TWO, "--max-restarts", "1", REPORTER, "--restarts", "1"], 0, None),
    "restarts_spent": ([*TWO, "--max-restarts", "1", REPORTER, "--restarts", "2"], 1, "exitcode  : 1 "),
}
STARTS = {"restarted": {"0", "1"}, "restarts_spent": {"0", "1"}}  # elsewhere there is only one


@pytest.fixture(
    scope="module",
    params=[
        whole("success"),  # test_torchrun_parity.py has it too
        whole("exit_1"),
        "recorded",
        whole("restarts_spent"),
        whole("exit_7"),
        whole("killed"),
        whole("restarted"),
    ],
)
def ending(request, tmp_path_factory):
    words, code, cause = ENDINGS[request.param]
    # A launcher that is itself a worker of another one hands its failure on in this file.
    env = {"TORCHELASTIC_ERROR_FILE": "{out}/handed_on"}
    return request.param, side_by_side(tmp_path_factory.mktemp(request.param), words, env), code, cause


def summary(launch) -> str:
    """The block that torchrun prints about failed workers, without times, ids and paths."""
    found = re.search(r"^=+\n.* FAILED\n-+\n.*?^=+$", launch.stderr, re.MULTILINE | re.DOTALL)
    return launch.anonymous(found[0]) if found else ""


def test_exit_code(ending):
    _, both, code, _ = ending
    assert {side: launch.returncode for side, launch in both.items()} == dict.fromkeys(SIDES, code)


def test_failure_summary(ending):
    _, both, _, cause = ending
    expected = summary(both["torchrun"])
    assert (cause in expected and "rank      : 1" in expected) if cause else not expected
    assert summary(both["autoddp"]) == expected


def handed_on(launch) -> str:
    """The content of the launcher's error file, without what differs between two launches."""
    file = launch.folder / "handed_on"
    text = launch.anonymous(file.read_text()) if file.exists() else ""
    return re.sub(r'"timestamp": "?\d+"?', '"timestamp": 0', text)


def test_failure_is_handed_on(ending):
    name, both, _, cause = ending
    expected = handed_on(both["torchrun"])
    assert cause in expected if name == "recorded" else not expected
    assert handed_on(both["autoddp"]) == expected


def test_restarts(ending):
    """Each start of each rank leaves a file that has the count in its name."""
    name, both, _, _ = ending
    files = both["torchrun"].reports().keys()
    assert {file.split(".")[1] for file in files} == STARTS.get(name, {"0"})
    assert both["autoddp"].reports().keys() == files


def test_no_process_is_left(ending):
    _, both, _, _ = ending
    assert {side: launch.processes() for side, launch in both.items()} == {side: [] for side in SIDES}
