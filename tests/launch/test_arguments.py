"""No word of a script's command line is lost or added: thousands of random ones against a real torchrun."""

import json
from pathlib import Path

import pytest
from launchers import environment, run_python, whole

BATCH = Path(__file__).with_name("command_lines.py")
MANY = 10_000


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [60, whole(MANY)])
def test_a_script_gets_what_torchrun_gives_it(count, tmp_path):
    done = run_python([str(BATCH), str(tmp_path), str(count)], env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["differ"] == []
    assert sum(found["ways"].values()) == count
    assert min(found["ways"].values()) > count / 40  # each way to name a script, each kind of parser
    assert found["taken"] > count / 10
    assert 0 < found["refused"] < count / 10
