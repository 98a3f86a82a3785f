"""One audit hook serves all checks of Python's audit events, which run in the order in which they were asked for."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, os, sys
hooks, add = [], sys.addaudithook
sys.addaudithook = lambda hook: (hooks.append(hook), add(hook))
from autoddp.isolation.hooks import check_events

seen = []

def refuse(path, *_):
    if path == "refused":
        raise PermissionError(path)
    seen.append(f"second: {path}")

check_events({"os.mkdir": lambda path, *_: seen.append(f"first: {path}")})
check_events({"os.mkdir": refuse, "os.rmdir": lambda path, *_: seen.append(f"removed: {path}")})
os.mkdir("made")
os.rmdir("made")
try:
    os.mkdir("refused")
except PermissionError:
    seen.append("it was refused")
print(json.dumps([len(hooks), seen, os.path.exists("refused")]))
"""


def test_all_checks_share_one_hook(tmp_path):
    """Python calls each hook at each event, also at each `id`: a script would pay for every further one."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True)
    hooks, seen, is_there = json.loads(done.stdout)
    assert hooks == 1
    expected = ["first: made", "second: made", "removed: made", "first: refused", "it was refused"]
    assert seen == expected
    assert not is_there
