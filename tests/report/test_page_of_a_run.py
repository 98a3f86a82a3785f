"""A real run leaves its page, and no fault of the page costs the launch."""

from __future__ import annotations

import json
import re
import stat
import sys
from pathlib import Path

import pytest
from launchers import SCRIPTS, Launch, start

LONG = {"TUNED_TIMES_LONGER": "12"}
BROKEN = """
import pathlib
pathlib.Path(__file__).with_name("imported").touch()
raise ImportError("this jinja2 is broken")
"""
NO_TRACE = """
from autoddp.cli import tuned

def fails(*_):
    raise OSError(28, "planted")

tuned.write_trace = fails
"""
# The process of which launchers are forks has imported what makes pages.
AS_NEW = """
import sys

for name in list(sys.modules):
    if name.partition(".")[0] == "jinja2" or name == "autoddp.report.page":
        del sys.modules[name]
"""
RUNS = "from autoddp.cli.main import main; main()"


def launched(command: tuple[str, ...], folder: Path, *options: str) -> Launch:
    words = ["--nproc-per-node", "2", *options, str(SCRIPTS / "plain.py")]
    launch = start(command, folder, words, LONG).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert (folder / "rank0.pt").exists()
    return launch


def test_a_run_leaves_its_page(tuned_plain: Path) -> None:
    (page,) = tuned_plain.glob(".autoddp/2*/report.html")
    summary = json.loads(page.with_name("summary.json").read_text())
    said = tuned_plain.with_name("out.stderr").read_text()
    assert re.search(rf"^autoddp: report: .*/out/{page.relative_to(tuned_plain)}$", said, re.MULTILINE)
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    text = page.read_text()
    assert "tests/scripts/plain.py" in text
    assert "2 ranks on 1 host (cpu), gloo" in text
    assert f"run {page.parent.name}" in text
    assert summary["recipe_text"].startswith("# A recipe of autoddp")
    assert "NUMA" in summary["topology"]


@pytest.mark.whole  # tests/cli/test_what_comes_of_tuning.py has the lines, tests/test_public_surface.py the imports
def test_a_page_and_a_trace_that_cannot_be_written_cost_a_line_each(tmp_path: Path) -> None:
    """Nor does a launch with the recipe import what makes pages."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "jinja2.py").write_text(BROKEN)
    finds_it = f"{AS_NEW}sys.path.insert(0, {str(broken)!r})\n"
    options = ["--trials", "1", "--allow", "exact", "--diagnose-budget", "0", "--trace"]
    launch = launched((sys.executable, "-c", finds_it + NO_TRACE + RUNS), tmp_path / "run", *options)
    (warning,) = [line for line in launch.stderr.splitlines() if "report.html" in line]  # nor does the answer name it
    assert warning.startswith("autoddp: warning: ")
    assert warning.endswith("report.html could not be written: this jinja2 is broken")
    assert sum("planted" in line for line in launch.stderr.splitlines()) == 1
    assert len(list(launch.folder.glob(".autoddp/2*/summary.json"))) == 1
    (broken / "imported").unlink()
    launched((sys.executable, "-c", finds_it + RUNS), tmp_path / "run")
    assert "autoddp: recipe scripts.plain.autoddp.toml: launching " in launch.stderr
    assert not (broken / "imported").exists()
