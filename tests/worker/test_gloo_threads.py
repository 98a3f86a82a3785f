"""Threads of gloo are at rest when their group is destroyed and when Python ends, in every job that we start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch
from launchers import environment, whole

from autoddp.knobs import Configuration
from autoddp.wire import WorkerConfig
from autoddp.wire.worker_config import naming_errors

SCRIPT = Path(__file__).with_name("endings.py")
RECIPE = WorkerConfig(configuration=Configuration({"gradient_as_bucket_view": True}))
CASES = {
    "as written": {
        "bare": (0, "late", "trained", "at exit"),
        "ddp destroyed": (0, "late", "destroyed", "trained", "at exit"),
        "ddp exit 3": (3, "late", "at exit"),
        "hook raises": (1, "late", "ValueError: of the script", "at exit"),
    },
    "recipe": {
        "ddp": (0, "late", "trained", "at exit"),
        "ddp destroyed": (0, "late", "destroyed", "trained", "at exit"),
        "ddp dropped cycle destroyed": (0, "late", "destroyed", "trained", "at exit"),
        "hook destroyed": (0, "late", "destroyed", "trained", "at exit"),
    },
}
"""The exit code, and lines of the rank's output in any order, except that "late" comes before "destroyed".

"late" is printed by a thread that is slow. Without autoddp it is missing, or comes too late.
"""

NAMED = """
import ctypes
from autoddp.worker.observe.kernel_accounts import pauses, peak_memory
from autoddp.worker.process.gloo_threads import wait_for_rest

ctypes.CDLL(None).prctl(15, "entraînement-été".encode(), 0, 0, 0)  # PR_SET_NAME
assert open("/proc/self/comm", "rb").read() == b"entra\\xc3\\xaenement-\\xc3\\n"
wait_for_rest()
assert peak_memory() > 0
assert pauses() >= 0
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there a thread's name can be read")
def test_a_script_that_names_its_process_is_no_error() -> None:
    """As by setproctitle. The kernel cuts the name after 15 bytes, here within a letter."""
    run = subprocess.run([sys.executable, "-c", NAMED], env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


REPLACED = """
import _thread, builtins, ctypes, time
from autoddp.worker.process.gloo_threads import wait_for_rest

def late():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
    time.sleep(60)
_thread.start_new_thread(late, ())
time.sleep(0.2)
{replaced}
wait_for_rest()
print("goes on")
"""


@pytest.mark.parametrize(
    "replaced",
    [
        "time.monotonic = lambda: 0.0; time.sleep = lambda seconds: None",
        "builtins.open = lambda path: 1 / 0",
        "builtins.open = lambda *_, **__: 1 / 0",
    ],
)
def test_what_a_script_has_replaced_does_not_end_it(replaced: str) -> None:
    """Nor does the wait last for ever where its clock stands still."""
    program = REPLACED.replace("{replaced}", replaced)
    done = forks.run(["-c", program], env=environment())
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="torch 2.6 and 2.8 give these threads no name to know them by")
@pytest.mark.parametrize("job", [whole("as written"), "recipe"])
def test_a_late_thread_is_waited_for(job: str) -> None:
    bare = environment()
    del bare["PYTHONPATH"]
    more = naming_errors(bare) | (RECIPE.environment(bare) if job == "recipe" else {})
    words = [sys.executable, SCRIPT, *CASES[job]]
    run = subprocess.run(words, env={**bare, **more}, capture_output=True, text=True, timeout=280)
    found = {}
    for case, code, printed in map(json.loads, run.stdout.splitlines()):
        lines = [line.removeprefix("[rank0]: ") for line in printed.splitlines()]
        found[case] = (code, *(line for line in CASES[job][case][1:] if line in lines))
        if "destroyed" in lines:
            assert lines.index("late") < lines.index("destroyed"), printed
    assert found == CASES[job], run.stdout + run.stderr
