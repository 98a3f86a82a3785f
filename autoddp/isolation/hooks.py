"""Two hooks into Python: after the import of a module, and before what Python reports as an audit event."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import wrapt


def when_imported(module: str, patch: Callable[[ModuleType], None]) -> None:
    """Call `patch(module)` right after its import, before the script takes functions from it.

    At once if it is imported already.
    """
    wrapt.register_post_import_hook(patch, module)


def check_events(checks: Mapping[str, Callable[..., None]]) -> None:
    """Call `checks[event]` with the event's arguments before each of these audit events.

    This is for good: an audit hook cannot be removed. Other events cost one look-up in `checks`.
    """

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        check = checks.get(event)
        if check is not None:
            check(*arguments)

    sys.addaudithook(hook)
