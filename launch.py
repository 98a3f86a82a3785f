"""`python launch.py …`: the same command as `autoddp …`, from a checkout that is not installed."""

import sys
from importlib.util import find_spec

NEEDS = ("torch", "optuna", "numpy", "wrapt", "rich", "shtab", "tomlkit", "msgspec", "pynvml", "psutil", "jinja2")
"""What autoddp imports beside Python's own modules; `pip install -e .` would bring them."""
NEEDS_BEFORE_3_11 = ("tomli",)
"""What it also imports where Python has no tomllib."""

if __name__ == "__main__":
    needs = (*NEEDS, *(NEEDS_BEFORE_3_11 if sys.version_info < (3, 11) else ()))
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        print(
            f"autoddp: error: launch.py: {sys.executable} has no {', '.join(missing)}: "
            "install what autoddp needs by `pip install -e .` in its checkout",
            file=sys.stderr,
        )
        sys.exit(2)
    from autoddp.cli.main import main

    main()
