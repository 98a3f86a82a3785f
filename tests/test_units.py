"""Times, sizes and shares are written in one way everywhere."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "autoddp"


def in_percent(source: str) -> list[int]:
    """The lines that write a share by the format `%`, which puts no blank before the sign."""
    specs = [node.format_spec for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FormattedValue)]
    return [spec.lineno for spec in specs if spec is not None and ast.unparse(spec).rstrip("'\"").endswith("%")]


def test_shares_are_written_by_one_helper() -> None:
    files = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    found = {name for name, path in files.items() if in_percent(path.read_text(encoding="utf-8"))}
    assert found == set()


def test_the_check_sees() -> None:
    assert in_percent('f"{share:.0%}"') == [1]
    assert in_percent('f"{share:+.1%} of {what:>9}"') == [1]
    assert in_percent('f"{share * 100:{form}} %"') == []
