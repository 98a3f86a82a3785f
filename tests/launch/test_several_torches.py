"""Hosts with other versions of torch: a study tries only what DDP has in all of them."""

from __future__ import annotations

from pathlib import Path

from launchers import BRIEF, SCRIPTS, start

LACKING = f"""
import os, sys
sys.path.insert(0, {str(SCRIPTS)!r})
import plain
ddp = plain.DDP

def built(module):
    model = ddp(module)
    from autoddp.worker.trial import describe_job
    if os.environ["RANK"] == "1":  # its torch has no such argument
        describe_job.AVAILABLE_ARGUMENTS = describe_job.AVAILABLE_ARGUMENTS - {{"gradient_as_bucket_view"}}
    return model

plain.DDP = built
sys.argv = ["plain.py"]
plain.main()
plain.stop()
"""


def test_what_one_rank_lacks_is_not_tried(tmp_path: Path) -> None:
    """The first rank's was tried: the other one's start failed, and a recipe would have had it on one host alone."""
    script = tmp_path / "lacking.py"
    script.write_text(LACKING)
    words = ["--nproc-per-node", "2", "--trials", "1", "--tune-only", "--diagnose-budget", "0", str(script)]
    launch = start(BRIEF, tmp_path / "out", words, {"OMP_NUM_THREADS": "1"}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    log = max(launch.folder.glob(".autoddp/2*/tuning.log")).read_text()
    (line,) = [line for line in log.splitlines() if "has no such argument" in line]
    assert "gradient_as_bucket_view" in line, log
