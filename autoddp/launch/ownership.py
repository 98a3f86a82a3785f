"""Whose option is it? The script's source tells."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import shutil
from pathlib import Path

from autoddp.errors import UsageError


def script_path(torchrun: argparse.Namespace) -> Path | None:
    """The script's file, or None where there is none to read (a binary, a module that is not found)."""
    if not torchrun.module:
        return Path(torchrun.training_script)
    try:
        spec = importlib.util.find_spec(torchrun.training_script)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin else None


def declared_by_script(option: str, torchrun: argparse.Namespace) -> bool:
    """Whether the script, or a module beside it that it imports, has an option of this name.

    argparse, click and absl write `--option` out; others make it of a dataclass's field or a function's parameter.
    Mistaking some other field for an option costs the user a pair of dashes, overlooking one costs a wrong training.
    """
    path = script_path(torchrun)
    tree = _parsed(path) if path else None
    if path is None or tree is None:
        return False
    beside = [_parsed(path.parent / f"{name}.py") for name in _imported(tree)]
    return any(_declares(option, found) for found in (tree, *beside) if found is not None)


def _parsed(path: Path) -> ast.Module | None:
    if not path.is_file():
        return None  # a pipe can be read only once: its content is the script's
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.replace(".", "/") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.replace(".", "/"))
    return names


def _declares(option: str, tree: ast.Module) -> bool:
    field = option.removeprefix("--").replace("-", "_")
    return any(
        (isinstance(node, ast.Constant) and node.value == option)
        or (isinstance(node, ast.ClassDef) and field in _fields(node))
        or (isinstance(node, ast.FunctionDef) and node.name == "main" and field in _parameters(node))
        for node in ast.walk(tree)
    )


def _fields(node: ast.ClassDef) -> set[str]:
    return {e.target.id for e in node.body if isinstance(e, ast.AnnAssign) and isinstance(e.target, ast.Name)}


def _parameters(node: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}


def require_script(torchrun: argparse.Namespace) -> None:
    """UsageError if there is nothing to run under that name."""
    script = torchrun.training_script
    if torchrun.module:
        return  # `python -m` itself knows best where modules are found
    if torchrun.no_python and shutil.which(script):
        return
    if not Path(script).exists():
        kind = "program" if torchrun.no_python else "script"
        raise UsageError(f"{kind} not found: {script} (looked in {Path.cwd()}); check the path, or -m for a module")
