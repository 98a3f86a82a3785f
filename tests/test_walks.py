"""The walks of docs/architecture.md are those of a real run; each has one direction."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import ROOT, environment, whole

WALKS = {
    "command-line": "the command line",
    "allow": "`--allow`",
    "knob": "a knob",
    "recipe": "its value in the recipe",
    "step": "a step's time",
}
"""Walk → how the page calls it."""


def on_the_page(name: str) -> list[str]:
    """The files that the page names, in order."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = re.search(rf"^- \*{re.escape(name)}\*,.*?: (.*?)\.$", text, re.DOTALL | re.MULTILINE)
    assert walk is not None, f"no walk of {name}"
    return [f"{file}.py" for file in re.findall("`(.*?)`", walk[1])]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("walk", ["command-line", *map(whole, ("allow", "knob", "recipe", "step"))])
def test_a_run_passes_the_files_that_the_page_names(walk: str) -> None:
    program = [sys.executable, str(Path(__file__).with_name("walks.py")), walk]
    # With more cores than ranks, a number of threads might be what is chosen.
    pinned = environment(OMP_NUM_THREADS="1")
    done = subprocess.run(program, env=pinned, capture_output=True, text=True, check=True)
    count, files = done.stdout.rpartition(" calls back\n")[::2]
    assert re.findall("^    ([^ ,]+)", files, re.MULTILINE) == on_the_page(WALKS[walk])
    assert count.splitlines()[-1].endswith(" files, 0")
