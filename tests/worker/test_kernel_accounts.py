"""Page faults, and threads that wait for a core, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from autoddp.knobs.env import keeps_memory

STEPS, TENSORS, BYTES = 20, 8, 2**21
# What stands for a tensor comes from malloc, as tensors do. Torch would take three CPU seconds to be imported.
SCRIPT = f"""
import json
from autoddp.worker.observe.kernel_accounts import PageFaultCount, peak_memory
def step():
    kept = [b"x" * {BYTES} for _ in range({TENSORS})]
step(), step()
count = PageFaultCount()
for _ in range({STEPS}):
    step()
found = count.taken()
print(json.dumps([found.count / {STEPS}, found.seconds, peak_memory()]))
"""


def measured(tunables: str) -> tuple[float, float, int]:
    environment = {**os.environ, "GLIBC_TUNABLES": tunables}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True)
    pages, seconds, peak = json.loads(done.stdout)
    return pages, seconds, peak


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_memory_that_is_returned_is_counted_when_it_comes_back() -> None:
    returned, seconds, peak = measured("glibc.malloc.mmap_threshold=131072")
    assert returned >= TENSORS  # one for each, where the kernel gives pages of 2 MiB; else 512
    assert seconds > 0
    assert peak > TENSORS * BYTES
    kept, _, more = measured(keeps_memory())
    assert kept < returned / 10
    assert abs(more - peak) < 3 * TENSORS * BYTES


CROWDED = """
import hashlib, json, os, threading
from autoddp.worker.observe.kernel_accounts import waited_for_cpu
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def work(rounds):
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", rounds)
def measured(of_main, of_helper):
    helper = threading.Thread(target=work, args=(of_helper,))
    before = waited_for_cpu()
    helper.start()
    work(of_main)
    found = waited_for_cpu() - before  # before the helper's thread ends, and its account with it
    helper.join()
    return [found.trains, found.helpers, found.helpers_ran]
print(json.dumps([measured(300_000, 900_000), measured(300_000, 1)]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the scheduler's account in /proc")
def test_who_has_waited_for_a_core() -> None:
    done = subprocess.run([sys.executable, "-c", CROWDED], check=True, capture_output=True, text=True)
    crowded, alone = json.loads(done.stdout)
    assert min(crowded) > 0.02
    assert crowded[1] > alone[1]
    assert crowded[2] > alone[2]


GAPS = """
import hashlib, json, os, threading
from autoddp.worker.observe.kernel_accounts import CoreWaits
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def crowded():
    helper = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"a", b"b", 900_000))
    helper.start()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 300_000)
    return helper.join
def blocking(does):
    waits.begins()
    waits.wait_begins()
    ends = does()
    waits.ends(is_blocking=True)
    ends()
waits, found = CoreWaits(), []
def tell():
    found.append([waits.waited, waits.seconds])
waits.begins()
waits.ends(is_blocking=True)
ends = crowded()
waits.begins()
ends()
waits.ends(is_blocking=True)
tell()
waits.pass_over()
blocking(crowded)
tell()
waits.begins()
ends = crowded()
waits.wait_begins()
ends()
waits.ends(is_blocking=False)
tell()
os.closerange(3, 64)
waits.begins()
tell()
print(json.dumps(found))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the scheduler's account in /proc")
def test_waits_between_calls_are_told_from_those_in_calls() -> None:
    """What lies between a call and a later wait for it is between calls; and a script may close all files."""
    done = subprocess.run([sys.executable, "-c", GAPS], check=True, capture_output=True, text=True)
    gap, blocking, asynchronous, closed = json.loads(done.stdout)
    assert 0.02 < gap[0] < gap[1]
    assert blocking[0] - gap[0] < gap[0] / 4, "it has waited in the call"
    assert asynchronous[0] - blocking[0] > 0.02, "it computes while the call goes on"
    assert asynchronous[1] - blocking[1] > 0.04
    assert closed == pytest.approx(asynchronous, abs=0.01)
