"""What a case is: one script of `scripts/`, and what its header says. The script is read and never imported.

load()["accelerate_accumulation"].title  # "Accelerate: gradient accumulation"
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent / "scripts"
TUNED = "tuned"
AS_WRITTEN = "as written: "
_REQUIRED = {"MODULES": tuple, "EXPECTED": str, "NOTE": str}
_OPTIONAL = {"EARLIER": False, "WORDS": (), "LAUNCH": "", "RANKS": 2}


@dataclass(frozen=True)
class Case:
    """One script, and how it is launched."""

    script: Path
    title: str
    """The first line of the docstring, without its period."""
    modules: tuple[str, ...]
    """Packages that it needs beside torch."""
    expected: str
    """`tuned`, or `as written: REGEX`: a line of autoddp's output must match, which says why it is not tuned."""
    note: str
    """What users should know, in one sentence."""
    earlier: bool
    """Whether an earlier job of the user's runs first, under torchrun and with COMPAT_EARLIER=1."""
    words: tuple[str, ...]
    """The script's own words."""
    launch: str
    """`-m`, `--no-python` (the program is NAME.sh, beside the script), or nothing: by its path."""
    ranks: int

    @property
    def name(self) -> str:
        return self.script.stem

    @property
    def why_as_written(self) -> str:
        """The REGEX for a script that is not tuned; else nothing."""
        return self.expected[len(AS_WRITTEN) :] if self.expected != TUNED else ""

    @property
    def command(self) -> list[str]:
        """What follows the launcher's own options."""
        launched = {"-m": f"compat.scripts.{self.name}", "--no-python": str(self.script.with_suffix(".sh"))}
        return [*filter(None, [self.launch]), launched.get(self.launch, str(self.script)), *self.words]

    def missing(self) -> str:
        """Why it cannot run here, or nothing."""
        absent = [module for module in self.modules if importlib.util.find_spec(module) is None]
        return f"needs {', '.join(absent)} (make compat installs it)" if absent else ""


def load() -> dict[str, Case]:
    """All cases, by name."""
    return {path.stem: read(path) for path in sorted(SCRIPTS.glob("*.py"))}


def read(path: Path) -> Case:
    """The case of one script. ValueError if its header is not sound."""
    tree = ast.parse(path.read_text())
    header = _header(tree)
    title = (ast.get_docstring(tree) or "").partition("\n")[0]
    for name, kind in _REQUIRED.items():
        if not isinstance(header.get(name), kind):
            raise ValueError(f"{path.name}: {name} must be a {kind.__name__}")
    for wrong, what in (
        (not re.fullmatch(r".+[^.]\.", title), "the docstring's first line must be the title, and end with a period"),
        (not re.fullmatch(r".+\.", header["NOTE"]), "NOTE must be a sentence"),
        (header["LAUNCH"] not in ("", "-m", "--no-python"), "LAUNCH must be -m or --no-python"),
        (header["EXPECTED"] != TUNED and not header["EXPECTED"].startswith(AS_WRITTEN), "EXPECTED: see case.py"),
        (header["EXPECTED"] == AS_WRITTEN, "EXPECTED must say why it is run as written"),
    ):
        if wrong:
            raise ValueError(f"{path.name}: {what}")
    re.compile(header["EXPECTED"])
    own = {field.lower(): value for field, value in header.items()}
    return Case(path, title[:-1], **own)


def _header(tree: ast.Module) -> dict[str, Any]:
    found: dict[str, Any] = dict(_OPTIONAL)
    for node in tree.body:
        name = getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""
        if name in _REQUIRED or name in _OPTIONAL:
            found[name] = ast.literal_eval(node.value)
    return found
