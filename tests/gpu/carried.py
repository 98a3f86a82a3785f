"""Unpacks what this interpreter lacks from the carried wheels: `carried.py FOLDER`, a folder for PYTHONPATH.

Only what is missing, so that nothing carried stands before what the machine has. A wheel is an archive whose contents
lie as they are imported; pip is not needed, nor an index.
"""

import importlib.metadata
import importlib.util
import re
import sys
import zipfile
from pathlib import Path

WHEELS = Path(__file__).parent / "wheels"
NEEDED = (
    "torch", "optuna", "numpy", "tomlkit", "wrapt", "psutil", "rich", "msgspec", "jinja2", "shtab", "pynvml", "pytest",
    "pytest_timeout",
)  # fmt: skip


def main() -> None:
    """Unpack, say what was, and stop if something is missing all the same."""
    site = Path(sys.argv[1])
    unpacked = [wheel.name for wheel in sorted(WHEELS.glob("*.whl")) if is_missing(wheel)]
    for name in unpacked:
        with zipfile.ZipFile(WHEELS / name) as archive:
            archive.extractall(site)
    if unpacked:
        print(f"from {WHEELS}: {', '.join(name.partition('-')[0] for name in unpacked)}", flush=True)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"missing: {', '.join(missing)}; fill {WHEELS} with tests/gpu/wheels.sh where an index answers"
        )


def is_missing(wheel: Path) -> bool:
    """Whether this interpreter has no such distribution."""
    name = re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


if __name__ == "__main__":
    main()
