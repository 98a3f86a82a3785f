"""`autoddp bench [torchrun's options]`: what the job's own link carries, as tables, JSON or a plot."""

from __future__ import annotations

import os

from autoddp.attempts.bench_job import BenchRequest, parse, run_bench
from autoddp.bench import store
from autoddp.bench.expectation import judge
from autoddp.errors import UsageError
from autoddp.log import show, show_json, tell, tell_wrapped
from autoddp.topology import verdicts
from autoddp.topology.probe import probe


def run(arguments: list[str]) -> int:
    """The exit code of `autoddp bench` with these arguments; AutoddpError for what the user has to mend.

        run(["--nproc-per-node", "2"])                      # tables on stdout, progress on stderr
        run(["--nproc-per-node", "2", "--json", "--svg", "link.svg"])

    On several nodes each prints the same and keeps the result in its own output folder.
    """
    request = parse(arguments)
    _require_room(request)
    if request.says:
        tell_wrapped(request.says)
    result = run_bench(request)
    try:
        tell(f"kept as {store(request.output, result)}")
        if request.svg is not None:
            from autoddp.report.bench_svg import svg

            request.svg.write_text(svg(result), encoding="utf-8")
    except OSError as problem:  # the figures are still printed
        tell(f"warning: {problem.filename}: not written: {problem.strerror}")
    verdict = judge(result, verdicts(probe()))
    if request.json:
        show_json(result.plain() | {"verdict": verdict})
    else:
        from autoddp.report.bench_tables import tables

        show("\n\n".join([tables(result), *verdict]))
    return 0


def _require_room(request: BenchRequest) -> None:
    """Files that cannot be written are an error before anything is started."""
    output, svg = request.output, request.svg
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UsageError(f"bench: --output {output}: cannot be written ({problem.strerror}); name a folder") from None
    if not os.access(output, os.W_OK):
        raise UsageError(f"bench: --output {output}: cannot be written; name a folder that can")
    if svg is not None and (os.path.isdir(svg) or not os.access(svg if os.path.exists(svg) else svg.parent, os.W_OK)):
        raise UsageError(f"bench: --svg {svg}: cannot be written; name a file in a folder that exists")
    if svg is not None:
        from autoddp.report.svg import require_replaceable

        require_replaceable(svg, "bench: --svg")
