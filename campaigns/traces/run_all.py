"""Every trace at every level of isolation, as a table.

    python campaigns/traces/run_all.py                    # all, at four levels
    python campaigns/traces/run_all.py --level overlay --only save_over,shell
    python campaigns/traces/run_all.py --plain            # without autoddp: each trace must change its folder
    python campaigns/traces/run_all.py --oracle           # under strace, by family

The traces share one tuned run, as long as none of them ends tuning. Under guard one may: `not tuned, launching as
written: ...`. It gets that verdict, and the others run again without it. The exit code is 1 if anything changed, if the
real job found another state than the user's, or if a trace that should have acted did not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[2] / name) for name in ("campaigns", "tests")]  # see job.py

from traces.frameworks import Framework, frameworks  # noqa: E402
from traces.oracle import unique, watch  # noqa: E402
from traces.room import Room, may_bind  # noqa: E402
from traces.trace import Trace, load  # noqa: E402
from traces.tuned import (  # noqa: E402
    LATE,
    LEVELS,
    RANKS,
    TORCHRUN,
    Level,
    Verdict,
    autoddp_words,
    changes,
    framework_env,
    job_words,
    tune,
    tune_framework,
)

# What the launcher makes for itself and removes: its socket, and a file by which tempfile tries whether it may write.
LAUNCHERS_OWN = re.compile(r"/tmp/(autoddp-[0-9a-f]+|[a-z0-9_]{8}$)")

Table = dict[str, dict[str, Verdict]]


def main() -> int:
    args = _arguments()
    began = time.monotonic()
    traces, scripts = _chosen(args.only)
    if args.oracle:
        return _oracle(traces, args.level or ["overlay", "guard"])
    if args.plain:
        table = _plain(traces, scripts)
    else:
        levels = [LEVELS[name] for name in args.level or LEVELS]
        table = _all_levels(levels, traces, [] if args.no_frameworks else scripts, args.jobs)
    bad = _print(table)
    print(f"{time.monotonic() - began:.0f} s")
    if args.json:
        as_words = {
            name: {
                level: {"kind": one.kind, "detail": one.detail, "lines": list(one.lines)} for level, one in row.items()
            }
            for name, row in table.items()
        }
        Path(args.json).write_text(json.dumps(as_words, indent=1))
    return 1 if bad else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", action="append", choices=list(LEVELS), help="one level (may be repeated)")
    parser.add_argument("--only", default="", help="names of traces, families or frameworks, with commas between")
    parser.add_argument("--no-frameworks", action="store_true")
    parser.add_argument("--plain", action="store_true", help="without autoddp: each trace must change something")
    parser.add_argument("--oracle", action="store_true", help="one run per family under strace")
    parser.add_argument("--jobs", type=int, default=2, help="levels at the same time")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def _chosen(only: str) -> tuple[list[Trace], list[Framework]]:
    words = {word for word in only.split(",") if word}
    traces = [one for one in load().values() if not words or {one.name, one.family} & words]
    scripts = [one for one in frameworks().values() if not words or {one.name, "frameworks"} & words]
    unknown = words - {one.name for one in traces} - {one.family for one in traces} - {one.name for one in scripts}
    if unknown - {"frameworks"}:
        sys.exit(f"no such trace, family or framework: {', '.join(sorted(unknown))}")
    return traces, scripts


def _all_levels(levels: Sequence[Level], traces: list[Trace], scripts: list[Framework], jobs: int) -> Table:
    table: Table = {one.name: {} for one in [*traces, *scripts]}
    with tempfile.TemporaryDirectory(prefix="traces-earlier-", dir="/var/tmp") as folder:
        earlier = {one.name: _earlier(one, Path(folder) / one.name) for one in scripts if not one.missing()}
        with ThreadPoolExecutor(jobs) as pool:
            for level, column in zip(levels, pool.map(lambda level: _level(level, traces), levels), strict=True):
                for name, verdict in column.items():
                    table.setdefault(name, {})[level.name] = verdict
            cells = [(level, one) for one in scripts for level in levels]
            for (level, one), verdict in zip(
                cells, pool.map(lambda cell: _framework(*cell, earlier), cells), strict=True
            ):
                table[one.name][level.name] = verdict
    return table


def _level(level: Level, traces: list[Trace]) -> dict[str, Verdict]:
    """All traces at one level, in as few runs as it goes."""
    column: dict[str, Verdict] = {}
    if level.user is not None and (os.geteuid() != 0 or not may_bind()):
        return {one.name: Verdict("skipped", "needs root, to become another user") for one in traces}
    batches = [[]]
    for one in traces:
        missing = one.missing()
        if one.root and (level.user is not None or os.geteuid() != 0):
            missing = "needs root"
        if missing:
            column[one.name] = Verdict("skipped", missing)
        else:
            batches[0].append(one)
    while batches:
        batch = batches.pop()
        if not batch:
            continue
        outcome = tune(level, batch, tune_only=level.isolation == "guard")
        _say(level, f"{len(batch)} traces: {outcome.ended or 'tuned'} {sorted(outcome.culprits) or ''}")
        if outcome.elsewhere:
            key = f"(elsewhere, with {batch[0].name}{' and others' if len(batch) > 1 else ''})"
            column[key] = Verdict("CHANGED", outcome.elsewhere[0], outcome.elsewhere)
        settled = {name: one for name, one in outcome.verdicts.items() if one.is_bad and one.kind != "idle"}
        if not outcome.ended or len(batch) == 1:
            column.update(outcome.verdicts)
            continue
        settled |= {name: Verdict("ended", outcome.ended) for name in outcome.culprits if name not in settled}
        column.update(settled)
        rest = [one for one in batch if one.name not in settled]
        if settled:
            batches.append(rest)
        else:  # nobody was in the middle of something: look in both halves
            batches += [rest[len(rest) // 2 :], rest[: len(rest) // 2]]
    return column


def _earlier(one: Framework, folder: Path) -> Path | None:
    """The user's earlier job: once for all levels."""
    if one.is_fresh:
        return None
    with Room() as room:
        (room.work / one.name).mkdir()
        finished = room.run([*TORCHRUN, *RANKS, str(one.script)], framework_env(room, one, "earlier"))
        if finished.returncode != 0:
            sys.exit(f"{one.name} does not run without autoddp:\n{finished.output[-3000:]}")
        for part in ("work", "home"):
            shutil.copytree(room.part(part), folder / part, symlinks=True)
    return folder


def _framework(level: Level, one: Framework, earlier: Mapping[str, Path | None]) -> Verdict:
    if one.missing():
        return Verdict("skipped", one.missing())
    if level.user is not None and (os.geteuid() != 0 or not may_bind()):
        return Verdict("skipped", "needs root, to become another user")
    outcome = tune_framework(level, one, earlier[one.name])
    verdict = outcome.verdicts[one.name]
    _say(level, f"{one.name}: {verdict}")
    if outcome.elsewhere and not verdict.is_bad:
        return Verdict("CHANGED", outcome.elsewhere[0], outcome.elsewhere)
    if outcome.ended and not verdict.is_bad:
        return Verdict("ended", outcome.ended)
    return verdict


def _plain(traces: list[Trace], scripts: list[Framework]) -> Table:
    """Without autoddp, by torchrun: a trace that changes nothing could not fail."""
    table: Table = {}
    usable = [one for one in traces if not one.missing() and not (one.root and os.geteuid() != 0)]
    for one in traces:
        if one not in usable:
            table[one.name] = {"plain": Verdict("skipped", one.missing() or "needs root")}
    if usable:
        names = [one.name for one in usable]
        with Room() as room:
            room.prepare(usable)
            before = room.look()
            finished = room.run([*TORCHRUN, *RANKS, *job_words(room, names, "--act")])
            time.sleep(LATE)
            by_trace, _ = changes(before, room.look(), names)
        if finished.returncode != 0:
            sys.exit(f"the traces do not run without autoddp:\n{finished.output[-5000:]}")
        table |= {name: {"plain": _plain_verdict(by_trace[name])} for name in names}
    for script in scripts:
        if script.missing():
            table[script.name] = {"plain": Verdict("skipped", script.missing())}
        else:
            table[script.name] = {"plain": _plain_framework(script)}
    return table


def _plain_framework(one: Framework) -> Verdict:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, Room() as room:
        earlier = _earlier(one, Path(folder) / "earlier")
        (room.work / one.name).mkdir()
        for part in ("work", "home") if earlier else ():
            shutil.copytree(earlier / part, room.part(part), symlinks=True, dirs_exist_ok=True)
        room.settle()
        before = room.look()
        finished = room.run([*TORCHRUN, *RANKS, str(one.script)], framework_env(room, one, "plain"))
        by_trace, _ = changes(before, room.look(), [one.name])
    if finished.returncode != 0:
        sys.exit(f"{one.name} does not run without autoddp:\n{finished.output[-3000:]}")
    return _plain_verdict(by_trace[one.name])


def _plain_verdict(lines: Sequence[str]) -> Verdict:
    """Here a change is what is asked for."""
    return Verdict("changes", f"{len(lines)} names", lines) if lines else Verdict("idle", "changes nothing")


def _oracle(traces: list[Trace], names: Sequence[str]) -> int:
    """One run per family and level under strace: what it lists outside of the run's own folder."""
    families = sorted({one.family for one in traces})
    bad = 0
    for name in names:
        level = LEVELS[name]
        for family in families:
            members = [one for one in traces if one.family == family and not one.missing()]
            with Room(level.user) as room:
                room.prepare(members)
                words = [*autoddp_words(level, room, "--tune-only"), *job_words(room, [one.name for one in members])]
                env = room.environment(level.env)
                watched = watch(words, [room.out], room.work, env, room.prefix())
            found = [one for one in unique(watched.findings) if not LAUNCHERS_OWN.match(one.path)]
            inside = f"{watched.elsewhere} of {watched.processes} processes in another mount namespace"
            print(f"{level.name:14} {family:14} {len(found)} findings, {inside}, exit code {watched.returncode}")
            for finding in found:
                print(f"    {finding}")
            bad += len(found)
    return 1 if bad else 0


def _print(table: Table) -> int:
    """The table; how many cells are bad."""
    levels = list(dict.fromkeys(level for row in table.values() for level in row))
    width = max((len(name) for name in table), default=0)
    print(f"{'trace':{width}}  {'  '.join(f'{level:28}' for level in levels)}")
    for name, row in table.items():
        cells = [str(row.get(level, "")).replace("\n", " ")[:28] for level in levels]
        print(f"{name:{width}}  {'  '.join(f'{cell:28}' for cell in cells)}".rstrip())
    print()
    bad = 0
    for name, row in table.items():
        for level, verdict in row.items():
            bad += verdict.is_bad
            if verdict.is_bad or verdict.kind == "ended":
                print(f"{name} at {level}: {verdict}")
                for line in verdict.lines[:12]:
                    print(f"    {line}")
    counts: dict[str, dict[str, int]] = {level: {} for level in levels}
    for row in table.values():
        for level, verdict in row.items():
            counts[level][verdict.kind] = counts[level].get(verdict.kind, 0) + 1
    for level in levels:
        print(f"{level}: {', '.join(f'{count} {kind}' for kind, count in sorted(counts[level].items()))}")
    return bad


def _say(level: Level, text: str) -> None:
    print(f"  {level.name}: {text[:200]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
