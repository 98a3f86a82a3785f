"""What `make test` costs, by file of tests: recorded by `make costs`, in costs.json.

    files = read()              # tests/launch/test_hosts.py → its cost
    files["tests/launch/test_hosts.py"].seconds

The record orders the files, the longest first, and `test_costs.py` holds its total.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RECORD = Path(__file__).with_name("costs.json")


@dataclass
class Cost:
    """Of one file of tests, or of several together."""

    tests: int = 0
    seconds: float = 0.0
    """Of its tests one after another, while other files ran beside them."""
    cpu: float = 0.0
    """CPU seconds, see `cpu_time.of_family`: two cores have 1200 in ten minutes."""
    launchers: int = 0
    """torchrun or autoddp, as forks of a process that has imported torch."""
    ranks: int = 0
    """What those launchers have started, as forks: ranks, and jobs of autoddp's own."""
    new: int = 0
    """Processes of Python from nothing: launchers, and what forked launchers have started so."""

    def add(self, other: Cost) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def read(where: Path = RECORD) -> dict[str, Cost]:
    """File of tests → its cost; nothing where there is no record yet."""
    if not where.exists():
        return {}
    return {name: Cost(**cost) for name, cost in json.loads(where.read_text())["files"].items()}


def write(files: Mapping[str, Cost], wall_seconds: float, where: Path = RECORD) -> None:
    """One line a file, so that a change of one shows as one."""
    lines = [f"    {json.dumps(name)}: {json.dumps(_short(cost, 1))}" for name, cost in sorted(files.items())]
    total = Cost()
    for cost in files.values():
        total.add(cost)
    head = {"wall_seconds": round(wall_seconds), "total": _short(total, 0)}
    body = ",\n".join(lines)
    where.write_text(json.dumps(head)[:-1] + ', "files": {\n' + body + "\n}}\n")


def _short(cost: Cost, digits: int) -> dict[str, float]:
    return {name: round(value, digits) for name, value in asdict(cost).items()}


def by_folder(files: Mapping[str, Cost]) -> dict[str, Cost]:
    """Folder of tests/ → its cost."""
    folders: dict[str, Cost] = {}
    for name, cost in files.items():
        folders.setdefault(str(Path(name).parent), Cost()).add(cost)
    return folders


def table(files: Mapping[str, Cost]) -> str:
    """For docs/tests.md: folders, the longest first."""
    rows = ["| folder | tests | seconds | CPU seconds | launchers | ranks | new processes |", "|---" * 7 + "|"]
    for name, cost in sorted(by_folder(files).items(), key=lambda pair: -pair[1].cpu):
        figures = (cost.tests, round(cost.seconds), round(cost.cpu), cost.launchers, cost.ranks, cost.new)
        rows.append(f"| {' | '.join(map(str, (name, *figures)))} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(read()))
