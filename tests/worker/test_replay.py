"""Calls are done again by real ranks, which end with the launcher, whatever ends that."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from launchers import PATIENCE, environment, forked, run_python

from autoddp import codec
from autoddp.torchrun.surroundings import for_own_workers
from autoddp.wire.replayed_calls import (
    CALLS,
    DESTROY_GROUP,
    MAKE_GROUP,
    OBJECTS,
    REST,
    WAIT,
    Act,
    Program,
    Replay,
    Replayed,
)
from autoddp.worker.bench.replay import _longest, _Run

LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-m", "autoddp.worker.bench.replay", *sys.argv[1:]], start_new_session=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(("asked", "undecided"), [(1.0, 2.0), (8.0, 16.0), (12.0, 16.0), (20.0, 20.0)])
def test_a_replay_takes_little_longer_than_it_may_where_a_gain_is_not_sure(asked: float, undecided: float) -> None:
    """`--diagnose-budget 1s` took 16 s."""
    plan = Replay({}, 2, 1, "gloo", asked)
    unsure, sure = (
        Replayed({"as written": (1.0,) * 8, "changed": rounds}, {}) for rounds in ((0.4, 1.4) * 4, (0.5,) * 8)
    )
    assert (_longest(plan, unsure), _longest(plan, sure)) == (undecided, asked)


def with_result(result: Path) -> set[int]:
    """Processes that have that path among their words: the replay, and its ranks."""
    found = set()
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if str(result) in words and "autoddp.worker.bench.replay" in words:
            found.add(one.pid)
    return found


def wait_for(count: int, result: Path) -> None:
    until = time.monotonic() + PATIENCE
    while len(with_result(result)) != count:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_warnings_that_the_user_makes_errors_end_no_worker_of_ours() -> None:
    variables = environment(PYTHONWARNINGS="error")
    words = [sys.executable, "-c", "import warnings; warnings.warn('a barrier over NCCL')"]
    done = subprocess.run(words, env={**variables, **for_own_workers(variables)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks in the current folder first")
def test_files_of_the_project_are_not_imported_by_workers_of_ours(tmp_path: Path) -> None:
    """Every job of ours is started with -m."""
    (tmp_path / "statistics.py").write_text("raise ValueError('of the project')\n")
    variables = {**environment(), **for_own_workers(environment())}
    words = [sys.executable, "-m", "autoddp.timing.samples"]
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_replay_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    plan, result = tmp_path / "plan.json", tmp_path / "result.json"
    long = Program(((0,),), ((Act(WAIT, sleeps=1000.0),),))
    plan.write_text(codec.encode(Replay({"as written": long}, 1, 1, "gloo", 1.0)))
    launcher = forked([sys.executable, "-c", LAUNCHER, str(plan), str(result)], env=environment())
    try:
        wait_for(3, result)  # the replay, its store, and its one rank
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(0, result)


def test_each_call_can_be_done_again(tmp_path: Path) -> None:
    """Two ranks do all of them in turns; one of the programs makes and destroys groups meanwhile."""
    calls = [Act(call, bytes=400) for call in sorted(CALLS | OBJECTS)]
    in_turns = [Act("allreduce", 1, 400), Act(MAKE_GROUP, 1), Act("allreduce", 1, 400, waits=False), Act(WAIT)]
    kept = [Act("allreduce", bytes=400, waits=False)] * 2 + [Act(WAIT, after=1), Act(WAIT, after=3)]  # handles
    several = Act("allreduce", bytes=400, tensors=3)  # beside one of as many bytes in one tensor
    types = [Act("allreduce", bytes=48, dtype=name) for name in ("bool", "bfloat16", "int32", "int64", "complex128")]
    of_rank = (
        *calls,
        *types,
        several,
        *kept,
        *in_turns,
        Act(DESTROY_GROUP, 1),
        *[Act(MAKE_GROUP, 1), Act(MAKE_GROUP, 1), Act(DESTROY_GROUP, 1, made_since=1), Act("allreduce", 1, 400)],
        # A group is called before it is destroyed: the other rank may not have connected yet where it was just made.
        *[Act(MAKE_GROUP, 1), Act("allreduce", 1, 400), Act(DESTROY_GROUP, 1)],
        *[Act("allreduce", 1, 400), Act(MAKE_GROUP, 1)],
        Act(REST, computes=1e-4),
    )
    programs = {
        "as written": Program(((0, 1), (0, 1), ()), (of_rank, of_rank)),
        "changed": Program(((0, 1), (0, 1)), ((*calls, *in_turns[:1]), (*calls, *in_turns[:1]))),
    }
    plan, result = tmp_path / "plan.json", tmp_path / "result.json"
    plan.write_text(codec.encode(Replay(programs, 2, 1, "gloo", 0.1)))
    done = run_python(["-m", "autoddp.worker.bench.replay", str(plan), str(result)], env=environment())
    assert done.returncode == 0, done.stderr
    found = codec.decode(result.read_text(), Replayed).seconds
    assert found.keys() == programs.keys()
    assert all(len(seconds) >= 3 and min(seconds) > 0 for seconds in found.values())


def processes_of(programs: dict[str, Program], folder: Path) -> tuple[set[str], Replayed]:
    """All processes that a replay has started, with one rank and as much time as it wants, and what it has found."""
    plan, result = folder / "plan.json", folder / "result.json"
    plan.write_text(codec.encode(Replay(programs, 1, 1, "gloo", 1000.0)))
    seen = set[str]()
    replay = forked([sys.executable, "-m", "autoddp.worker.bench.replay", str(plan), str(result)], env=environment())
    try:
        while replay.poll() is None:
            with contextlib.suppress(OSError):
                seen |= set(Path(f"/proc/{replay.pid}/task/{replay.pid}/children").read_text().split())
            time.sleep(0.01)
    finally:
        replay.kill()
    assert replay.returncode == 0
    return seen, codec.decode(result.read_text(), Replayed)


def test_the_rounds_are_divided_among_several_starts_of_the_ranks(tmp_path: Path) -> None:
    """What one start happens to get would else be the price."""
    alike = Program(((0,),), ((Act(REST, sleeps=0.02),),))
    seen, found = processes_of({"as written": alike, "changed": alike}, tmp_path)
    assert len(seen) == 4 * 2  # four times a store and a rank
    assert [len(seconds) for seconds in found.seconds.values()] == [40, 40]
    assert found.in_calls == {"as written": (pytest.approx(0.0, abs=5e-3),), "changed": (pytest.approx(0.0, abs=5e-3),)}


def test_rounds_that_agree_within_one_start_are_not_enough(tmp_path: Path) -> None:
    """A gain that six rounds tell well may be that of their start alone."""
    long, none = Program(((0,),), ((Act(REST, sleeps=0.1),),)), Program(((0,),), ((),))
    seen, found = processes_of({"as written": long, "changed": none}, tmp_path)
    assert len(seen) >= 2 * 2
    assert len(found.seconds["changed"]) > 6


def test_a_group_has_the_backend_that_it_has_in_the_script() -> None:
    """One of gloo beside NCCL, for numbers of the host, is done again by gloo; one that torch has not got cannot be."""
    acts = tuple(Act("allreduce", group, 8, device="cpu") for group in range(4))
    program = Program(((0,),) * 4, (acts,), backends=("cpu:gloo", "gloo", "of_somebody_else", ""))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = _Run(program, 0, torch.device("meta"))
        assert [str(dist.get_backend(group)) for group in run._groups] == ["cpu:gloo", "gloo", "gloo", "gloo"]
        assert [data.whole.device.type for data in run._data.values()] == ["cpu", "cpu", "meta", "meta"]
    finally:
        dist.destroy_process_group()


def test_a_round_takes_as_long_as_ranks_that_do_the_same_take_on_average(tmp_path: Path) -> None:
    """Whatever the slowest of them takes; those that do nothing do not count."""
    apart, long, short = ((0,), (1,)), (Act(REST, sleeps=0.1),), (Act(REST, sleeps=1e-3),)
    programs = {
        "slowest": Program(apart, (long, short)),
        "each": Program(apart, (long, short), of_each=True),
        "one": Program(apart, (long, ()), of_each=True),
        "none": Program(apart, ((), ()), of_each=True),
    }
    plan, result = tmp_path / "plan.json", tmp_path / "result.json"
    plan.write_text(codec.encode(Replay(programs, 2, 1, "gloo", 0.1)))
    done = run_python(["-m", "autoddp.worker.bench.replay", str(plan), str(result)], env=environment())
    assert done.returncode == 0, done.stderr
    found = {name: min(seconds) for name, seconds in codec.decode(result.read_text(), Replayed).seconds.items()}
    assert min(found["slowest"], found["one"]) > 0.09  # less what a sleep takes too long, see `_late`
    assert 0.045 < found["each"] < found["slowest"]
    assert found["none"] == 0


@pytest.mark.parametrize(
    ("call", "size", "dtype", "elements"),
    [
        ("allreduce", 4, "float32", 1),
        ("allreduce", 8, "int64", 1),
        ("broadcast", 3, "bool", 3),
        ("alltoall_base", 4, "float32", 4),  # each rank gets a part
        ("barrier", 0, "", 1),
    ],
)
def test_a_call_has_as_many_elements_as_in_the_script(
    call: str, size: int, dtype: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring of four ranks takes twice as long for four numbers as for one, because it sends each of them by itself."""
    monkeypatch.setattr(_Run, "_new_group", lambda _self, _ranks: None)
    act = Act(call, bytes=size, dtype=dtype)
    run = _Run(Program(((0, 1, 2, 3),), ((act,),) * 4), 0, torch.device("cpu"))
    (data,) = run._data.values()
    assert len(data.whole) == elements


def test_ranks_that_send_by_turns_need_no_more_memory_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Run, "_new_group", lambda _self, _ranks: None)
    acts = tuple(Act("broadcast", bytes=400, root=root, waits=waits) for root in (0, 1) for waits in (True, False))
    run = _Run(Program(((0, 1),), (acts, acts)), 0, torch.device("cpu"))
    assert len({data.whole.data_ptr() for data in run._data.values()}) == 1
    assert [data.arguments[1].rootRank for data in run._data.values()] == [0, 0, 1, 1]
