"""nvidia-smi as it behaves on bad days: absent, failing, warning first, silent for ever. Real programs on the PATH."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from autoddp.topology.nvidia.smi import SmiFailed, SmiHangs, ask


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = tmp_path / "nvidia-smi"
    path.touch(mode=0o755)
    return path


def test_its_words_come_back(program: Path) -> None:
    program.write_text('#!/bin/sh\necho "WARNING: infoROM is corrupted" >&2\necho "asked: $*"\n')
    assert ask("topo", "-m") == "asked: topo -m\n"


def test_output_counts_though_it_fails_afterwards(program: Path) -> None:
    program.write_text("#!/bin/sh\necho GPU0 X\nexit 14\n")
    assert ask("topo", "-m") == "GPU0 X\n"


def test_failure_is_told_in_its_words(program: Path) -> None:
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver' >&2\nexit 9\n")
    with pytest.raises(SmiFailed, match="ended with 9 and said: NVIDIA-SMI has failed: no driver"):
        ask("topo", "-m")


def test_no_program_and_no_right_program(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program.write_text("no script, no binary")
    with pytest.raises(SmiFailed, match="could not be started"):
        ask("topo", "-m")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SmiFailed, match="there is no nvidia-smi"):
        ask("topo", "-m")


def test_a_hang_ends_with_the_time_limit(program: Path) -> None:
    program.write_text("#!/bin/sh\ntrap '' TERM\nexec sleep 60\n")
    began = time.monotonic()
    with pytest.raises(SmiHangs, match=r"did not answer within 0\.3 s"):
        ask("topo", "-m", time_limit=0.3)
    assert time.monotonic() - began < 10
