"""What `make` sets up, where an earlier try was cut off."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(folder: Path, *words: str) -> int:
    """The exit code of make there, with this project's Makefile; not as a part of the make that runs the tests."""
    for name in ("Makefile", "pyproject.toml"):
        (folder / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "PYTHONPATH")}
    return subprocess.run(["make", *words], cwd=folder, env=alone, capture_output=True).returncode


def program(place: Path, does: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"#!/bin/sh\n{does}\n")
    place.chmod(0o755)


def test_an_environment_without_pip_is_made_whole(tmp_path: Path) -> None:
    """As Ctrl-C leaves it, and a Debian without python3-venv: each further try ended with "No module named pip"."""
    program(tmp_path / ".venv" / "bin" / "python", '[ -e whole ] || [ "$2" != pip ]')
    program(tmp_path / "new", 'if [ "$2" = venv ]; then touch whole; fi')
    assert make(tmp_path, ".venv/.ready", "PYTHON=./new") == 0
    assert (tmp_path / "whole").exists()


def test_a_package_that_was_half_installed_is_not_there(tmp_path: Path) -> None:
    """pip goes by what it has noted: it would have taken the newest torch, and not the one for torchvision."""
    (tmp_path / "half" / "torch").mkdir(parents=True)
    program(tmp_path / "bin" / "python", f'cd half && exec "{sys.executable}" -S "$@"')
    (tmp_path / "asks.mk").write_text("include Makefile\nhas:\n\t$(call HAS,torch)\n")
    assert make(tmp_path, "-f", "asks.mk", "has", "BIN=bin") != 0
    noted = tmp_path / "half" / "torch-2.13.0.dist-info"
    noted.mkdir()
    (noted / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    assert make(tmp_path, "-f", "asks.mk", "has", "BIN=bin") == 0
