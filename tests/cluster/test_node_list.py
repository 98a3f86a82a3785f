"""The first name of a list of nodes: as scontrol has it, where there is one, and nothing for what is no usual list."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from autoddp.cluster.node_list import first_name

FIRST = {
    "n[01-04,07]": "n01",
    "n[007,010-012]": "n007",
    "n7": "n7",
    "gpu3,gpu7": "gpu3",
    "b[9-10],a1": "b9",
    "r[0-1]n[2-3]": "r0n2",
    "n1.site.org,n2.site.org": "n1.site.org",
    "ip-10-0-0-[4,9]": "ip-10-0-0-4",
    "host_a-1": "host_a-1",
}
NO_LISTS = (
    "",
    "n[1-2].site",
    "[1-2]",
    "n[",
    "n]",
    "n[a-c]",
    "n[1-]",
    "n[]",
    "n[1",
    "a,,b",
    ",a",
    "a b",
    "n[1-2",
    "$(id)",
    "n[1][",
)


@pytest.mark.parametrize(("text", "name"), FIRST.items())
def test_the_first_name(text: str, name: str, tmp_path: Path) -> None:
    assert first_name(text) == name
    if shutil.which("scontrol"):
        (tmp_path / "slurm.conf").write_text("ClusterName=any\nSlurmctldHost=any\n")  # without one it does nothing
        variables = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
        command = ["scontrol", "show", "hostnames", text]
        expanded = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        assert expanded.stdout.split()[0] == name


@pytest.mark.parametrize("text", NO_LISTS)
def test_another_text_has_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert first_name(text) is None


def test_scontrol_expands_what_is_no_usual_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list whose digits are in base 36, as of some machines with many dimensions."""
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$*" = "show hostnames tux[0x8]" ] && printf "tux00\\ntux01\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert first_name("tux[0x8]") == "tux00"
    assert first_name("tux[0x9]") is None
