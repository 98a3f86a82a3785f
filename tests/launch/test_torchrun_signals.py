"""A signal to the launcher: the workers get it too, everything ends, with torchrun's exit code."""

import contextlib
import signal

import pytest
from launchers import REPORTER, SIDES, start, wait_for, whole

WORDS = ["--nproc-per-node", "2", REPORTER, "--wait"]
# name: signal, what the launcher is told about signals, what the workers are sent
SIGNALS = {
    "SIGINT": (signal.SIGINT, [], signal.SIGINT),
    "SIGTERM": (signal.SIGTERM, [], signal.SIGTERM),
    "SIGUSR1": (signal.SIGUSR1, ["--signals-to-handle", "SIGTERM,SIGUSR1"], signal.SIGUSR1),
}


@pytest.fixture(scope="module", params=["SIGINT", whole("SIGTERM"), "SIGUSR1"])
def signalled(request, tmp_path_factory):
    """Both launchers, ended by a signal once their workers were ready for it."""
    number, words, _ = SIGNALS[request.param]
    parent = tmp_path_factory.mktemp(request.param)
    with contextlib.ExitStack() as cleanup:
        launches = {}
        for side, command in SIDES.items():
            launches[side] = start(command, parent / side, [*words, *WORDS])
            cleanup.callback(launches[side].kill)
        for side, launch in launches.items():
            wait_for(lambda launch=launch: len(launch.reports()) == 2, f"the workers of {side}")
            launch.process.send_signal(number)
        yield request.param, {side: launch.wait() for side, launch in launches.items()}


def test_exit_code(signalled):
    _, both = signalled
    assert both["torchrun"].returncode != 0
    assert both["autoddp"].returncode == both["torchrun"].returncode


def test_workers_get_the_signal(signalled):
    name, both = signalled
    received = {
        side: {path.name: int(path.read_text()) for path in launch.folder.glob("signal*")}
        for side, launch in both.items()
    }
    assert received["torchrun"] == dict.fromkeys(("signal0", "signal1"), int(SIGNALS[name][2]))
    assert received["autoddp"] == received["torchrun"]


def test_last_words(signalled):
    """The exception that names the signal, as the last line of both."""
    name, both = signalled
    last = {side: launch.anonymous(launch.stderr.strip().splitlines()[-1]) for side, launch in both.items()}
    assert f"got signal: {int(SIGNALS[name][0])}" in last["torchrun"]
    assert last["autoddp"] == last["torchrun"]


def test_no_process_is_left(signalled):
    _, both = signalled
    assert {side: launch.processes() for side, launch in both.items()} == {side: [] for side in SIDES}
