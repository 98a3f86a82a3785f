"""One rank at a time makes its steps while the others stand still, and none waits for ever."""

from __future__ import annotations

import json
from pathlib import Path

import forks
from launchers import environment, free_port
from turns_checks import BEFORE, BLOCK, STEPS, WARMUP


def test_ranks_make_their_steps_by_turns(tmp_path: Path) -> None:
    of_job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    program = [str(Path(__file__).with_name("turns_checks.py")), str(tmp_path)]
    ranks = [forks.popen(program, env=environment(RANK=str(rank), **of_job)) for rank in range(2)]
    for rank in ranks:
        assert rank.wait(100) == 0
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    timed = slice(BEFORE + 1 + WARMUP, BEFORE + 1 + BLOCK)
    assert len(first[timed]) == STEPS
    assert second[timed][0][0] >= first[timed][-1][1]
    # In the second block rank 0 cannot end its turn before rank 1 has begun its own: rank 1 does not wait for ever.
    assert json.loads((tmp_path / "alone.json").read_text()) == [[True, True], [True, False]]
    assert len(first) == len(second) == BEFORE + 1 + 2 * BLOCK
