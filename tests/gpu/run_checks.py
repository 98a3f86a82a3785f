"""Runs the checks of this folder, each in a process of its own, and ends with a table: check, outcome, figure.

    run_checks.py [WORD ...]        those whose names contain one of the words; all without words

A process of its own, because a capture that fails, or a device that runs out of memory, may spoil what comes after it.
The exit code is 1 if a check failed or hung, 0 if all passed or said what they need that is not here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ORDER = (
    "gpu_clock",
    "gpu_rebuilds",
    "gpu_hooks",
    "gpu_powersgd",
    "gpu_ranks",
    "gpu_mesh",
    "gpu_memory",
    "gpu_gradient_monitor",
    "gpu_bypass",
    "gpu_capture",
    "gpu_graphs",
    "gpu_nccl",
    "gpu_tuned",
    "gpu_diagnose",
)
SECONDS = 90
"""For a check without a limit of its own: the mark `timeout` gives one."""


def collected(words: list[str]) -> dict[str, int]:
    """Check → its limit in seconds, in the order in which they are to run."""
    # Bodies that also run on a CPU do so in `make test`.
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu", str(HERE)]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "limits.json"
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "GPU_LIMITS": str(place)}, capture_output=True, text=True
        )
        # A file that cannot be imported leaves the others: they must not pass for all there is.
        if done.returncode or not place.exists():
            raise SystemExit(f"the checks cannot be collected:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        limits: dict[str, int] = json.loads(place.read_text())
    wanted = [name for name in limits if not words or any(word in name for word in words)]
    return {name: limits[name] or SECONDS for name in sorted(wanted, key=_place)}


def _place(name: str) -> int:
    return next((number for number, part in enumerate(ORDER) if f"test_{part}.py" in name), len(ORDER))


def run(name: str, seconds: int) -> dict[str, Any]:
    """One check: its name, outcome, figure or reason, and how long it took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "result.json"
        environment = {**os.environ, "GPU_RESULT": str(place)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", str(seconds), name]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds + 30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            found = {"outcome": "hung", "figure": f"not over after {seconds} s"}
        else:
            found = {"outcome": "failed", "figure": f"ended with {process.returncode}"}
            if place.exists():
                found = json.loads(place.read_text())
    if found["outcome"] in ("failed", "hung"):
        print(f"\n--- {name}\n{output[-4000:]}", flush=True)
    return {"check": name.partition("gpu/")[2] or name, **found, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    """Run, print, write."""
    import torch

    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else "none"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    about = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "nccl": nccl, "devices": device}
    print("  ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    rows = []
    for name, seconds in collected(sys.argv[1:]).items():
        rows.append(run(name, seconds))
        print(f"{rows[-1]['seconds']:6.1f} s  {rows[-1]['outcome']:7}  {rows[-1]['check']}", flush=True)
    width = max((len(row["check"]) for row in rows), default=0)
    print("\n" + "\n".join(f"{row['check']:{width}}  {row['outcome']:7}  {row['figure']}" for row in rows), flush=True)
    if os.environ.get("OUT"):
        place = Path(os.environ["OUT"]) / "gpu_checks.json"
        place.write_text(json.dumps({"about": about, "checks": rows}, indent=2) + "\n")
    if any(row["outcome"] in ("failed", "hung") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
