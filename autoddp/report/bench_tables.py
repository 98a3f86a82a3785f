"""The link as tables of plain text: one for each layout, its model below it, then what hooks cost in computing."""

from __future__ import annotations

from autoddp.bench import BenchResult, LinkFacts, LinkModel, Sweep, algbw, busbw
from autoddp.tables import aligned
from autoddp.units import data_size, milliseconds, percent


def tables(result: BenchResult) -> str:
    """The whole result as several lines of text. Times in µs, bandwidths in GB/s (10^9 bytes per second)."""
    parts = [f"{world_of(result.facts)}, torch {result.facts.torch}: all-reduce of float32, in place"]
    if result.round_trip is not None:
        parts.append(f"a small TCP message between two nodes and back: {_micro(result.round_trip)} µs")
    parts += [_sweep(sweep) for sweep in result.sweeps]
    if result.hooks:
        parts.append(_hooks(result))
    return "\n\n".join(parts)


def world_of(facts: LinkFacts) -> str:
    """`4 ranks on 2 nodes, gloo, cpu`."""
    nodes = f"{facts.nodes} node{'s' if facts.nodes > 1 else ''}"
    return f"{facts.world_size} ranks on {nodes}, {facts.backend}, {' and '.join(facts.devices)}"


def _sweep(sweep: Sweep) -> str:
    errors = {one.bytes: one.relative_error for one in sweep.model.residuals} if sweep.model else {}
    rows = [("size", "time µs", "99 % interval", "algbw GB/s", "busbw GB/s", "model off by")]
    for p in sweep.points:
        bandwidths = (_short(algbw(p.bytes, p.seconds)), _short(busbw(p.bytes, p.seconds, sweep.ranks)))
        interval = f"{_micro(p.low)} to {_micro(p.high)}"
        off = percent(errors[p.bytes], "+.1f") if p.bytes in errors else "-"
        rows.append((data_size(p.bytes), _micro(p.seconds), interval, *bandwidths, off))
    lines = [f"{sweep.layout}: {sweep.ranks} ranks", aligned(rows, numbers=True)]
    if sweep.stopped:
        lines.append(sweep.stopped)
    return "\n".join([*lines, *(_model(sweep.model) if sweep.model else [])])


def _model(model: LinkModel) -> list[str]:
    """`from 64.0 KiB: 35.1 µs + bytes / 1.17 GB/s`, one line for each segment."""
    lines = [f"model, off by {percent(model.worst, '.1f')} at most:"]
    for segment in model.segments:
        slope = f" + bytes / {_short(segment.beta / 1e9)} GB/s" if segment.seconds_per_byte else ", whatever the size"
        lines.append(f"  from {data_size(round(segment.from_bytes))}: {_micro(segment.alpha_seconds)} µs{slope}")
    return lines


def _hooks(result: BenchResult) -> str:
    sizes = list(dict.fromkeys(cost.point.bytes for cost in result.hooks))
    found = {(c.hook, c.rank, c.point.bytes): c.point.seconds for c in result.hooks}
    rows = [("hook", *map(data_size, sizes))]
    for hook, rank in dict.fromkeys((cost.hook, cost.rank) for cost in result.hooks):
        times = [found.get((hook, rank, size)) for size in sizes]
        name = f"{hook} rank {rank}" if rank else hook
        rows.append((name, *("-" if time is None else milliseconds(time) for time in times)))
    return "\n".join(["computing of the hooks alone, ms for one square matrix", aligned(rows, numbers=True)])


def _micro(seconds: float) -> str:
    micro = seconds * 1e6
    return f"{micro:.1f}" if abs(micro) < 1000 else f"{micro:.0f}"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
