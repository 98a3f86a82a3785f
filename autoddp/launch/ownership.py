"""Whose option is it? The script's source tells."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import shutil
from pathlib import Path

from autoddp.errors import UsageError


def source_of(torchrun: argparse.Namespace) -> str:
    """The script's text, or nothing where there is none to read (a binary, a package, a module that is not found)."""
    path: str | None = torchrun.training_script
    if torchrun.module:
        try:
            spec = importlib.util.find_spec(torchrun.training_script)
        except (ImportError, ValueError):
            spec = None
        path = spec.origin if spec else None
    try:
        return Path(path).read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError):
        return ""


def declared_by_script(option: str, torchrun: argparse.Namespace) -> bool:
    """Whether the script names `--option` in a string of its own: argparse, click and absl all write it out."""
    try:
        tree = ast.parse(source_of(torchrun))
    except (SyntaxError, ValueError):
        return False
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return option in texts


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
