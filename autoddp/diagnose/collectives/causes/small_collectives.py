"""Many small calls follow each other where one call would do."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.merging import calls_at, merged, places_of, runs, seconds_in, side_by_side
from autoddp.diagnose.collectives.table import SMALL
from autoddp.units import data_size

_SIZES = range(65, SMALL + 1)  # bytes of a call: fewer are numbers, see `scalar_collectives`
_FEWEST = 2  # calls of a run, on average


class SmallCollectives(Cause):
    in_words = "many small calls in place of one"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        script = job.script
        if script is None:
            return
        into = runs(script, _SIZES)
        keys = {*into, *into.values()}
        if len(keys) < _FEWEST * len(set(into.values())) or not into:
            return
        lines = places_of(script, keys)
        made = {line: calls_at(script, keys, line) for line in lines}
        function = {line: of_it[0].call.place.as_function for line, of_it in made.items()}
        run_of = {line: {into.get(one.key, one.key) for one in of_it} for line, of_it in made.items()}
        of_first = [key for key in keys if into.get(key, key) in run_of[lines[0]]]
        in_a_row = len(of_first) / len(run_of[lines[0]])  # other lines may make shorter runs, or longer ones
        # What torch makes itself nobody can make one: the fix is given the words for it.
        others = [line for line in lines[1:] if not all(one.call.place.by for one in made[line])]
        together = [line for line in others if run_of[line] & run_of[lines[0]]]
        apart = [f"{line} ({function[line]})" for line in others if line not in together]
        what, sizes = function[lines[0]], [one.act.bytes for one in made[lines[0]]]
        seen = (
            f"{lines[0]} calls {what} {in_a_row:.0f} times in a row with {data_size(sum(sizes) // len(sizes))} each: "
            "such a call takes as long as the ranks need to meet, whatever it moves"
        )
        # A line is known with the dtype and the operation of its first call: a loop, or a helper, may have several.
        roots = {one.act.root for of_it in made.values() for one in of_it}
        kinds = "dtype, operation and root" if len(roots) > 1 else "dtype and operation"
        waits = all(one.act.waits for line in (lines[0], *together) for one in made[line])
        fix = (
            f"{' and of those of '.join([f'{lines[0]}: make one call of them', *together])}, one for each {kinds}, "
            "where none is computed from the result of another: "
            f"{_one_call(what, waits)}"
        )
        if apart:
            fix += f"; do the same at {' and at '.join(apart)}"
        at_once = ("async_op=True, and all waits after the last call", side_by_side(script, into))
        does_so = not any(one.act.waits for of_it in made.values() for one in of_it)
        yield Suspicion(
            self.name,
            seen,
            fix,
            guess=seconds_in(script, keys),
            changed=merged(script, into),
            tried="one call of all bytes for each run",
            beside=() if does_so else (at_once,),
            lines=lines,
        )


def _one_call(what: str, waits: bool) -> str:
    """The call of all bytes, and how each tensor gets its part of the result.

    `waits`: whether the calls are over when they return. Else the result is there only behind a wait.
    """
    work, wait = ("", "") if waits else ("work = ", "where the script waits for them now, work.wait(); ")
    flat = "flat = torch.cat([t.detach().reshape(-1) for t in tensors]); "
    if "all_to_all" in what or "reduce_scatter" in what:
        found = (
            "where each tensor has as much for every rank, n = dist.get_world_size(group); rows = torch.cat("
            "[t.detach().reshape(n, -1) for t in tensors], 1); "
        )
        if "all_to_all" in what:
            call = "got = torch.empty_like(rows); dist.all_to_all_single(got, rows, group=group); "
            return f"{found}{call}got.split([t.numel() // n for t in tensors], 1) are the results"
        empty = "got = torch.empty_like(rows[0]); "
        call = f"{work}dist.reduce_scatter(got, list(rows), …) with its other arguments; {wait}"
        return f"{found}{empty}{call}got.split([t.numel() // n for t in tensors]) are the results"
    if "gather" in what:
        return (
            f"{flat}everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]; "
            "dist.all_gather(everyone, flat, group=group); "
            "everyone[r].split([t.numel() for t in tensors]) are the pieces of rank r"
        )
    return (
        f"{flat}{work}dist.{what}(flat, …) with the other arguments that it has now; {wait}"
        "for t, piece in zip(tensors, flat.split([t.numel() for t in tensors])): "
        "t.detach().copy_(piece.view_as(t))"
    )


CAUSE = SmallCollectives()
