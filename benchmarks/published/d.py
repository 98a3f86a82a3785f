"""Experiment D: six patterns that people look for in a trace, each planted, found by `autoddp diagnose`, and mended.

    python benchmarks/published/d.py --json d.json       # as root: about 40 minutes
    python benchmarks/published/d.py --only kernels      # one of them

A pattern is planted by a job of jobs/slow/, which is then run with the fix that the diagnosis names: the gain stands
beside the predicted one. Some patterns have several causes, and each of those is a row. Small kernels and long copies
to the device, and values that are read from it, need a GPU; on one GPU two ranks share it.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import options, say, table, verdict, write_json
from diagnose import SIZES, Case, Row, cannot, measured, number

PATTERNS: list[tuple[str, Case]] = [
    ("idle gaps: a rank does other work", Case("rank0_work", options=("--kind", "log"), ranks=(0,))),
    ("idle gaps: the all-reduce holds up the next forward pass", Case("exposed_communication", place="lab")),
    ("no overlap: one large bucket", Case("no_overlap", place="lab")),
    ("no overlap: find_unused_parameters", Case("find_unused_parameters", place="lab")),
    ("straggler: more work on one rank", Case("straggler", options=("--kind", "work"), ranks=(1,))),
    ("straggler: uneven batches", Case("uneven_batches")),
    ("loader stall: decoding in the loop", Case("data_loader", options=("--kind", "jpeg", "--on", "1"), ranks=(1,))),
    ("idle gaps: the script reads values from the device", Case("sync_points")),
    ("small kernels: hundreds of small operations", Case("launch_bound", job="small_kernels")),
    ("long copies to the device: pageable memory", Case("host_device_copy")),
]
ON_A_GPU = ("launch_bound", "host_device_copy", "sync_points")


def why_not(case: Case) -> str:
    """Why this machine cannot show it, or ""."""
    if case.cause in ON_A_GPU and not torch.cuda.is_available():
        return "needs a GPU"
    return cannot(case.place)


def show(rows: list[tuple[str, Row]]) -> None:
    """The table, and the fixes."""
    cells = []
    for pattern, row in rows:
        price, real = number(row.ms, row.low, row.high), number(row.real, row.real_low, row.real_high)
        found = "error" if row.error else row.first
        cells.append((pattern, found, verdict(row.right and row.right_ranks), number(row.step_ms), price, real))
    table(("pattern", "found", "right, ranks too", "step ms", "predicted gain ms", "gain of the fix ms"), cells)
    for pattern, row in rows:
        for finding in (row.diagnosis or {"findings": []})["findings"][:1]:
            print(f"{pattern}: {finding['text']}\n    fix: {finding['fix']}")


def main() -> None:
    """Plant, find, mend."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="of whole jobs, as written and mended (4)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""], help="rows with one of these texts (all)")
    parser.add_argument("--size", choices=SIZES, default="large", help="how slow the jobs are (large)")
    args = parser.parse_args()
    args.runs, args.gains_only = 1, False
    if args.quick:
        args.rounds = 2
    args.most_rounds = args.rounds
    rows, left_out = [], {}
    with tempfile.TemporaryDirectory(prefix="published-d-") as folder:
        for place, (pattern, case) in enumerate(PATTERNS):
            if not any(part in pattern for part in args.only):
                continue
            if why_not(case):
                left_out[pattern] = why_not(case)
                continue
            say(f"{pattern}: {case}")
            rows += [(pattern, row) for row in measured(case, args.size, Path(folder, str(place)), args)]
    if rows:
        show(rows)
    for pattern, why in left_out.items():
        print(f"left out: {pattern}: {why}")
    write_json(args.json, {"patterns": {pattern: asdict(row) for pattern, row in rows}, "left_out": left_out})


if __name__ == "__main__":
    main()
