"""Scripts that train by a framework's own loop and let it write its own checkpoints and logs.

Each is one trace. A script runs in three ways, see modes.py: as the user's earlier job, which leaves what is precious;
while it is tuned; and as the real job, which looks what it would go on from.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ALSO_FRESH = ("hf_trainer", "lightning_fit")  # what these write in a fresh folder, a later job takes for its own


@dataclass(frozen=True)
class Framework:
    """One script, either after an earlier job of the user's or in a fresh folder."""

    script: Path
    is_fresh: bool
    modules: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.script.stem}_fresh" if self.is_fresh else self.script.stem

    def missing(self) -> str:
        """Why it cannot run here, or nothing."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"needs the Python package {module} (pip install 'autoddp[compat]')"
        return ""


def frameworks() -> dict[str, Framework]:
    """All scripts of this folder, by name: what one needs stands in its line `MODULES = (...)`."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        modules = _modules(path)
        if modules is not None:
            for is_fresh in (False, True) if path.stem in ALSO_FRESH else (False,):
                one = Framework(path, is_fresh, modules)
                found[one.name] = one
    return found


def _modules(path: Path) -> tuple[str, ...] | None:
    """Read without importing: nothing of it may be installed."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MODULES":
            return tuple(ast.literal_eval(node.value))
    return None
