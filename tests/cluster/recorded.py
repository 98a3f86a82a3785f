"""What platforms set, in tests/data/clusters: a file for each situation.

read("slurm-batch")["SLURM_NNODES"]
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1] / "data" / "clusters"
NAMES = sorted(path.stem for path in _FOLDER.glob("*.env"))


def read(name: str) -> dict[str, str]:
    """The variables of one situation. The first line says where they are from; a line that is indented goes on."""
    first, *lines = (_FOLDER / f"{name}.env").read_text(encoding="utf-8").splitlines()
    assert first.startswith("# ")
    found: dict[str, str] = {}
    variable = ""
    for line in lines:
        if line.startswith(" "):
            found[variable] += f"\n{line.strip()}"
        else:
            variable, _, value = line.partition("=")
            found[variable] = value
    return found
