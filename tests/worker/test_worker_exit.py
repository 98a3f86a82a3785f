"""A rank that leaves has done its part in every collective, as far as it can be waited for. No GPU: `FakeCuda`."""

from __future__ import annotations

import io
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
from fake_cuda import FakeCuda
from launchers import environment
from torch.distributed import HashStore
from torch.multiprocessing.spawn import ProcessRaisedException

from autoddp.log import tell
from autoddp.processes.children import how_ended
from autoddp.wire import Finish
from autoddp.worker.process.device import finish_queued_work
from autoddp.worker.process.ending import in_a_line, leave
from autoddp.worker.process.rank_store import RankStore
from autoddp.worker.trial import runner
from autoddp.worker.trial.runner import TrialRunner


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.reserved = {0: 0, 1: 2**20}
    fake.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return fake


def test_a_rank_leaves_when_its_device_has_finished(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[list[int]] = []
    monkeypatch.setattr(os, "_exit", lambda code: waited.append([code, *cuda.waited]))
    leave()
    assert waited == [[0, 1]]  # exit code 0; of the two devices the one that holds memory


UNHEARD_RANK = """
import os, resource
from autoddp.wire import LauncherClient
from autoddp.worker.process import device
from autoddp.worker.process.ending import leave_unless_heard
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # as a script may do, and the launcher would not be heard of DDP
leave_unless_heard(LauncherClient("/nowhere"))
"""


def test_a_rank_that_cannot_reach_the_launcher_does_not_end_as_if_it_trained_without_ddp() -> None:
    """Its exit code is all that the launcher learns of it."""
    done = forks.run(["-c", UNHEARD_RANK], env=environment(RANK="0", LOCAL_RANK="0"))
    assert "could not reach the launcher" in how_ended(done.returncode)
    assert done.stderr == "autoddp: this rank cannot reach the launcher: OSError(24, 'Too many open files')\n"


class Lines:
    """A script's own `sys.stderr` that has no other method, as one that hands lines on to a logger."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> None:
        self.written += text


def test_a_rank_tells_and_leaves_though_the_scripts_own_streams_cannot_be_flushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under torchrun, where nobody flushes them; a closed one, or none, stops nothing either."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    closed, lines = io.StringIO(), Lines()
    closed.close()
    for stream in (closed, None, lines):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        tell("heard")
        leave()
    assert (lines.written, ended) == ("autoddp: heard\n", [0, 0, 0])


HAS_A_HOOK = """
import sys
from types import SimpleNamespace
from autoddp.worker.process.ending import watch_the_end
watch_the_end(SimpleNamespace(goodbye=lambda why: print("said:", why)))
sys.excepthook = lambda *_: print("the script's own hook")
if "fails" in sys.argv:
    raise KeyError("x")
"""


@pytest.mark.parametrize(
    ("word", "said"), [("fails", "the script's own hook\nsaid: KeyError: 'x'\n"), ("", "said: \n")]
)
def test_what_has_ended_a_script_is_said_though_it_has_a_hook_of_its_own(word: str, said: str) -> None:
    """As scripts have that send their exceptions to a log."""
    done = forks.run(["-c", HAS_A_HOOK, word], env=environment())
    assert (done.stdout, done.returncode) == (said, int(word == "fails"))


def test_a_device_that_never_finishes_is_left_alone(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, never = threading.Event(), threading.Event()

    def synchronize(device: int) -> None:
        entered.set()
        never.wait()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    finish_queued_work(0.1)
    assert entered.wait(10)
    never.set()


def test_a_device_is_waited_for_also_where_no_thread_can_begin(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on none can in an exit handler, and some scripts destroy their process group in one."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    finish_queued_work(1000)
    assert cuda.waited == [1]


def test_a_process_without_a_device_leaves_at_once(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    finish_queued_work(1000)
    assert cuda.contexts == set()


def test_the_study_is_over_after_the_device_has_finished_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(runner, "finish_queued_work", lambda _: done.append("device"))
    ranks: Any = SimpleNamespace(rank=0, broadcast=lambda order: order, part=lambda: done.append("part"))
    director: Any = SimpleNamespace(next=lambda _: Finish(), finish=lambda _: done.append("leave"))
    TrialRunner(None, ranks, director, None).begin()  # type: ignore[arg-type]
    assert done == ["device", "part", "leave"]


def test_no_rank_parts_before_the_last_has_come() -> None:
    store, parted = HashStore(), []

    def rank(number: int) -> RankStore:
        ranks = RankStore.__new__(RankStore)  # its constructor goes by the environment of a rank
        ranks.rank, ranks.world_size, ranks._store, ranks._turn = number, 3, store, 0
        return ranks

    def part(ranks: RankStore) -> None:
        ranks.part()
        parted.append(ranks.rank)

    early = [threading.Thread(target=part, args=[rank(number)]) for number in (0, 1)]
    for thread in early:
        thread.start()
    store.wait(["1/1"])  # rank 1 is there
    assert parted == []
    last = rank(2)
    assert last._store.add("unused", 1) == 1  # the store answers: the others do wait for a rank
    assert parted == []
    part(last)
    for thread in early:
        thread.join()
    assert sorted(parted) == [0, 1, 2]


def test_an_exception_of_mp_spawn_is_told_by_its_last_line() -> None:
    """Its text begins with empty lines and has the traceback of the process that the script has started."""
    trace = 'Traceback (most recent call last):\n  File "train.py", line 8\nValueError: no data\n'
    error = ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\n{trace}", 1, 4711)
    assert in_a_line(error) == "ProcessRaisedException: ValueError: no data"
