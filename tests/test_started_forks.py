"""Ranks that the tests start as forks are what they would be as new processes."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import forks
import pytest
from launchers import AUTODDP, environment, start
from started_forks import Preloaded

from autoddp.torchrun.surroundings import for_own_workers

DESCRIBES = r"""
import json, os, signal, sys, time
outside = sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names)
import torch
import torch.distributed
import common

main, torchs = sys.modules["__main__"], [name for name in sys.modules if name.startswith("torch")]
# An import of torch._dynamo sets this one, and the forks' server has imported it before.
variables = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
description = {
    "words": [sys.argv, sys.orig_argv, open("/proc/self/cmdline").read().rstrip("\0")],
    "environment": [variables, open("/proc/self/environ").read().count("RANK=")],
    "paths": [sys.path, os.getcwd()],
    "modules": [outside, sorted(name for name in torchs if "dynamo" not in name)],
    "module": [torch.__spec__.name, torch.nn.__spec__.origin, torch.__file__, torch.nn.parallel.__name__],
    "main": [main.__file__, main.__name__, str(main.__spec__), main.__package__],
    "session": [os.getsid(0) == os.getpid(), os.umask(0o22)],
    "streams": [sys.stdout.encoding, sys.stdout.write_through, sys.stderr.errors, sys.stdout.fileno()],
    "descriptors": [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")],
    "signals": [str(signal.getsignal(number)).partition(" at ")[0] for number in sorted(signal.valid_signals())],
    "threads": torch.get_num_threads(),
}
places = [os.path.join(os.environ["OUT"], f"rank{rank}.json") for rank in range(2)]
with open(places[int(os.environ["RANK"])], "w") as file:
    json.dump(description, file, indent=1)
while not all(map(os.path.exists, places)):  # the first rank that fails ends the other
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    time.sleep(600)
raise ValueError("as planned")
"""


def describe(folder: Path, popen: Any) -> list[str]:
    """How a launch of two ranks ends, what each rank says of itself, and what it prints at its end."""
    folder.mkdir()
    script = folder / "describes.py"
    script.write_text(DESCRIBES)
    variables = {"PYTHONPATH": str(Path(__file__).parent / "scripts"), "OMP_NUM_THREADS": "2"}
    words = ["--nproc-per-node", "2", "--log-dir", "{out}/logs", "--redirects", "3"]
    launch = start((*AUTODDP, "--trials", "0"), folder / "out", [*words, str(script), "-x"], variables, popen).wait()
    assert launch.returncode == 1
    found = []
    for rank in ("0", "1"):
        said = (launch.folder / f"rank{rank}.json").read_text()
        (log,) = launch.folder.glob(f"logs/*/attempt_0/{rank}/stderr.log")
        text = launch.anonymous(f"{said}\n{log.read_text() * (rank == '0')}").replace(str(folder), "<folder>")
        found.append(re.sub(r'(<uuid>_|"MASTER_PORT": ")\w+', r"\1<any>", text))
    return found


def test_what_a_library_sets_in_pytests_process_begins_no_new_one() -> None:
    """scikit-learn does: each rank that was started afterwards, in that process, was a new one, for 3 CPU seconds."""
    server = Preloaded.__new__(Preloaded)
    server._environment = {"PATH": "/bin"}
    assert not server._begins_otherwise({"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"})
    assert server._begins_otherwise({"MALLOC_ARENA_MAX": "1"})
    assert server._begins_otherwise({"PYTHONWARNINGS": "error"})


STARTS = "import os, subprocess, sys; sys.exit(subprocess.run((sys.executable, '-m', 'job')).returncode)"
BECOMES = "import os, sys; os.execve(sys.executable, [sys.executable, '-m', 'job'], os.environ)"
JOB = """
import sys, warnings
print([one for one in sys.path if "cwd" in one], sys.argv[1:], sys.warnoptions, warnings.filters[0])
"""


@pytest.mark.parametrize("code", [STARTS, BECOMES], ids=["starts", "becomes"])
def test_a_job_of_our_own_is_a_fork_too(code: str, tmp_path: Path) -> None:
    """Its variables leave the current folder out of sys.path, and end no worker by a warning."""
    environ = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]]))
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "cwd").mkdir()
    env, before = {**environ, **for_own_workers(environ)}, Counter(forks.STARTS)
    new = subprocess.run([sys.executable, "-m", "job"], cwd=tmp_path / "cwd", env=env, capture_output=True, text=True)
    starts = f"import os; os.environ.update({env!r})\n{code}"
    forked = forks.run(["-c", starts], cwd=tmp_path / "cwd", env=environment())
    assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)
    assert new.stdout.endswith("['ignore'] ('ignore', None, <class 'Warning'>, None, 0)\n")
    assert (Counter(forks.STARTS) - before)["ranks"] == 1


def test_a_forked_rank_is_like_a_new_process(tmp_path: Path) -> None:
    assert describe(tmp_path / "forked", None) == describe(tmp_path / "new", subprocess.Popen)
