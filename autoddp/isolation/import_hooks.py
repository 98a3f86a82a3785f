"""Calls a function when a module has been imported, so that it can replace functions before the script takes them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import wrapt


def when_imported(module: str, patch: Callable[[ModuleType], None]) -> None:
    """Call `patch(module)` right after its import; at once if it is imported already."""
    wrapt.register_post_import_hook(patch, module)
