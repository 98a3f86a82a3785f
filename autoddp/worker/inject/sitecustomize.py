"""Runs at the start of every Python process of an autoddp job, because its folder stands first in PYTHONPATH.

It arms the worker, takes its own traces out of the environment and gives way to a sitecustomize of the user's, if there
is one. Whatever goes wrong here must not stop the script: it is said in one line and the script runs as written.
"""

import importlib
import importlib.util
import os
import sys


def _package() -> None:
    """autoddp from the checkout this file lies in, without putting that folder on the script's sys.path."""
    if "autoddp" not in sys.modules:
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        spec = importlib.util.spec_from_file_location(
            "autoddp", os.path.join(root, "__init__.py"), submodule_search_locations=[root]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["autoddp"] = module
        spec.loader.exec_module(module)


def _give_way() -> None:
    """Import the sitecustomize that would have run without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if this is not None:
            sys.modules["sitecustomize"] = this


order = os.environ.pop("AUTODDP_WORKER", None)
if order is not None:
    try:
        _package()
        from autoddp.worker.arm import arm

        arm(order)
    except Exception as error:
        print(f"autoddp: warning: the script runs as written, the worker could not start: {error!r}", file=sys.stderr)
_give_way()  # last: it may raise, and it is to find the environment as the user had it
