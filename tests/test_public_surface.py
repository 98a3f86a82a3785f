"""What a script may use, and what an import costs. Imports are checked in fresh processes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from launchers import environment

import autoddp


def imported_by(statement: str) -> set[str]:
    """Top-level packages in sys.modules after the statement."""
    program = f"import sys\n{statement}\nprint(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=True
    )
    return set(done.stdout.split())


def test_exported_names() -> None:
    assert sorted(autoddp.__all__) == ["__version__", "is_tuning", "load_run"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", autoddp.__version__)


@pytest.mark.parametrize(("value", "tuning"), [("1", True), ("0", False), ("", False), (None, False)])
def test_is_tuning(monkeypatch: pytest.MonkeyPatch, value: str | None, tuning: bool) -> None:
    monkeypatch.delenv("AUTODDP_TUNING", raising=False)
    if value is not None:
        monkeypatch.setenv("AUTODDP_TUNING", value)
    assert autoddp.is_tuning() is tuning


@pytest.mark.parametrize(
    ("statement", "wanted", "unwanted"),
    [
        ("import autoddp", "autoddp", "torch numpy optuna rich wrapt json"),
        ("import autoddp.worker.process.bootstrap", "wrapt", "torch numpy optuna rich tomlkit"),
        ("import autoddp.isolation.elsewhere", "wrapt", "torch numpy optuna rich"),
        ("import autoddp.cli.main", "autoddp", "torch numpy optuna rich wrapt tomlkit"),
        ("import autoddp.cli.recipe", "autoddp", "torch optuna rich"),
        ("import autoddp.cli.report", "autoddp", "torch numpy optuna rich wrapt tomlkit jinja2"),
        ("import autoddp.report, autoddp.cli.tuned", "rich", "jinja2"),
        ("import autoddp.cli.bench", "autoddp", "torch optuna rich wrapt tomlkit"),
        ("import autoddp.bench", "autoddp", "torch numpy optuna rich"),
        ("import autoddp.study.trials", "optuna", "torch rich"),
    ],
)
def test_imports_are_light(statement: str, wanted: str, unwanted: str) -> None:
    found = imported_by(statement)
    assert wanted in found
    assert found & set(unwanted.split()) == set()
