"""What the ranks of `autoddp bench` time: all-reduces in their groups, and the real hooks on a rank of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from autoddp.worker.bench import burst
from autoddp.worker.bench.all_reduce import AllReduces, of_slowest_group
from autoddp.worker.bench.hook_cost import TIMED, HookCosts

LAYOUTS = {"within": [[0, 1]], "between": [[0, 2]], "all": [[0, 1, 2]]}


def acts(rank: int) -> dict[str, Any]:
    real = dist.all_reduce
    reduces, hooks = AllReduces(LAYOUTS, torch.device("cpu")), HookCosts(torch.device("cpu"))
    found: dict[str, Any] = {name: reduces.run(name, 4096, 3, 2) for name in LAYOUTS}
    buckets = [torch.zeros(5), torch.zeros(3)]
    burst._check(buckets)
    found["zeros"] = all(not bucket.any() for bucket in buckets)
    dist.all_reduce = lambda tensor, async_op: real(tensor[1:] if rank == 1 else tensor.clone()[1:], async_op=async_op)
    try:
        burst._check(buckets)
    except SystemExit as why:
        found["lost"] = str(why)
    finally:
        dist.all_reduce = real
    found["hooks"] = [hooks.run(*hook, 64, 2, 3) for hook in TIMED]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(3, acts, tmp_path_factory.mktemp("acts"))


def test_only_a_layouts_ranks_take_part(ranks: list[dict[str, Any]]) -> None:
    for layout, groups in LAYOUTS.items():
        for rank, found in enumerate(ranks):
            assert len(found[layout]) == (2 if rank in groups[0] else 0)
            assert all(0 < seconds < 10 for seconds in found[layout])


def test_a_setting_under_which_data_are_lost_is_noticed(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["zeros"]
        assert found["lost"] == "wrong sums"


def test_a_rank_that_waits_for_too_long_says_so_and_ends() -> None:
    program = (
        "import time; from autoddp.worker.bench.deadline import Deadline; d = Deadline(); "
        "d.within(100, 'starting'); d.within(0.1, 'measuring'); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "autoddp bench: rank 0 is still measuring after 0 s: another rank, its host or the network does not answer; "
        "see that all hosts are up and can reach each other"
    ]


def test_every_hook_runs_without_the_others(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert [len(blocks) for blocks in found["hooks"]] == [3] * len(TIMED)
        assert all(seconds > 0 for blocks in found["hooks"] for seconds in blocks)


def test_the_mean_over_ranks_of_the_slowest_group() -> None:
    by_rank = [[1.0, 8.0], [3.0, 8.0], [1.0, 9.0], [2.0, 11.0]]
    assert of_slowest_group(by_rank, [[0, 1], [2, 3]]) == [2.0, 10.0]
    assert of_slowest_group([[1.0], [], [3.0]], [[0, 2]]) == [2.0]
