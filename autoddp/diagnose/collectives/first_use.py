"""Finds where a script first reads what a collective has changed, as far as its source tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LARGEST = 2**20  # bytes of a file that is read
_COLLECTIVES = ("all_", "broadcast", "reduce", "gather", "scatter", "barrier")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class FirstUse:
    """What comes after a call in its block, and in those around it up to the loop or the function."""

    name: str
    """What the call was given, such as `grad`."""
    line: int
    """Line that reads it first; 0 if nowhere before the end of the loop or the function."""


def first_use(file: str, line: int) -> FirstUse | None:
    """The reading of what the collective in this line has changed; None if at once, or if the source does not tell."""
    try:
        path = Path(file)
        if path.stat().st_size > _LARGEST:
            return None
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    for statements in _followed(tree, []):
        found = _call_in(statements[0], line)
        if found is not None:
            name = _changed(found)
            return None if name is None else _after(name, statements[1:])
    return None


def _followed(node: ast.AST, behind: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Each statement with those that follow it: of its block, then of the blocks around it, up to a loop or a function.

    A loop begins again, and who calls a function reads what it likes: what comes behind them is not known.
    """
    for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody", "handlers", "cases")):
        if not isinstance(block, list):
            continue
        for place, inner in enumerate(block):
            if not isinstance(inner, ast.stmt):  # a handler of exceptions, or a case
                yield from _followed(inner, behind)
                continue
            then = block[place + 1 :] + behind
            yield [inner, *then]
            yield from _followed(inner, [] if isinstance(inner, (*_LOOPS, *_FUNCTIONS)) else then)


def _call_in(statement: ast.stmt, line: int) -> ast.Call | None:
    """The collective of this line, if the statement is nothing but that call."""
    if not isinstance(statement, ast.Expr | ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    return statement.value if statement.lineno <= line <= (statement.end_lineno or line) else None


def _changed(call: ast.Call) -> str | None:
    """What the call writes: its first argument, in all functions of torch.distributed."""
    given = call.args[0] if call.args else next((one.value for one in call.keywords if one.arg == "tensor"), None)
    return None if given is None else ast.unparse(given)


def _after(name: str, statements: list[ast.stmt]) -> FirstUse | None:
    works = False
    for statement in statements:
        if any(ast.unparse(node) == name for node in ast.walk(statement) if isinstance(node, ast.expr)):
            return FirstUse(name, statement.lineno) if works else None
        if isinstance(statement, ast.Return):
            return None  # it may be read behind: by another name, where an object holds it
        works |= any(isinstance(node, ast.Call) and not _is_collective(node) for node in ast.walk(statement))
    return FirstUse(name, 0) if works else None


def _is_collective(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2].startswith(_COLLECTIVES)
