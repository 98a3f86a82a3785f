"""Finds where a script first reads what a collective has changed, as far as its source tells."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

_LARGEST = 2**20  # bytes of a file that is read
_COLLECTIVES = ("all_", "broadcast", "reduce", "gather", "scatter", "barrier")


@dataclass(frozen=True)
class FirstUse:
    """What comes after a call in its block."""

    name: str
    """What the call was given, such as `grad`."""
    line: int
    """Line that reads it first; 0 if nowhere in the same block."""


def first_use(file: str, line: int) -> FirstUse | None:
    """The reading of what the collective in this line has changed; None if at once, or if the source does not tell."""
    try:
        path = Path(file)
        if path.stat().st_size > _LARGEST:
            return None
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    for node in ast.walk(tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list):
                for place, statement in enumerate(block):
                    found = _call_in(statement, line)
                    if found is not None and found.args:
                        return _after(ast.unparse(found.args[0]), block[place + 1 :])
    return None


def _call_in(statement: ast.AST, line: int) -> ast.Call | None:
    """The collective of this line, if the statement is nothing but that call."""
    if not isinstance(statement, ast.Expr | ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    return statement.value if statement.lineno <= line <= (statement.end_lineno or line) else None


def _after(name: str, statements: list[ast.stmt]) -> FirstUse | None:
    works = False
    for statement in statements:
        if any(ast.unparse(node) == name for node in ast.walk(statement) if isinstance(node, ast.expr)):
            return FirstUse(name, statement.lineno) if works else None
        works |= any(isinstance(node, ast.Call) and not _is_collective(node) for node in ast.walk(statement))
    return FirstUse(name, 0) if works else None


def _is_collective(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2].startswith(_COLLECTIVES)
