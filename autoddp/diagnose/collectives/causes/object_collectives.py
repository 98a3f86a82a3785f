"""Python objects travel, pickled, where a tensor would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.merging import calls_at, places_of, seconds_in
from autoddp.diagnose.collectives.program import Played, with_
from autoddp.units import data_size

_AS_TENSORS = {
    "all_gather_object": "allgather",
    "gather_object": "allgather",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "scatter",
}
_FIXES = {
    "all_gather_object": "mine = torch.tensor([loss, correct]{type}); all_of_them = [torch.empty_like(mine) for _ in "
    "range(dist.get_world_size(group))]; dist.all_gather(all_of_them, mine, group=group)",
    "gather_object": "mine = torch.tensor([loss, correct]{type}); all_of_them = [torch.empty_like(mine) for _ in "
    "range(dist.get_world_size(group))]; dist.all_gather(all_of_them, mine, group=group)",
    "broadcast_object_list": "numbers = torch.tensor([rate, stop]{type}); dist.broadcast(numbers, src, group=group)",
    "scatter_object_list": "mine = torch.empty(2{type}); dist.scatter(mine, list(numbers) if rank == src else None, "
    "src, group=group)",
}
"""The group stays: if some ranks called the default group in place of theirs, they would wait for ever. `{type}` is
double precision, because in single precision a seed is another one on the ranks that get it than on the one that has
drawn it; and the device. `all_gather_into_tensor` is deprecated from torch 2.13 on, and what replaces it is not in
older versions."""
_FIX_OF_LARGE = "send the tensors in these objects by a function for tensors, with the same group: it pickles nothing"
_NUMBERS = 64  # bytes of the numbers that an object is taken to hold
_SMALL = 16 * 1024  # bytes of an object that may be a few numbers


class ObjectCollectives(Cause):
    in_words = "objects in place of tensors"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        script = job.script
        if script is None:
            return
        keys = script.agreed(lambda one: one.act.call in _AS_TENSORS)
        if not keys:
            return

        def as_tensors(played: Sequence[Played]) -> Iterator[Played]:
            for one in played:
                if one.key in keys:
                    size = min(one.act.bytes, _NUMBERS) if one.act.bytes <= _SMALL else one.act.bytes
                    yield Played(with_(one.act, call=_AS_TENSORS[one.act.call], bytes=size), one.key, one.call)
                else:
                    yield one

        lines = places_of(script, keys)
        first, *others = (calls_at(script, keys, line)[0] for line in lines)
        what = first.act.call
        seen = (
            f"{lines[0]} sends Python objects by {what} ({data_size(first.act.bytes)} pickled): each call pickles "
            "them, sends their sizes first, and unpickles those of all ranks"
        )
        fix = f"{lines[0]}: {_fix(first)}"
        for line, one in zip(lines[1:], others, strict=True):
            fix += f"; {line}: {_fix(one) if _fix(one) != _fix(first) else 'the same'}"
        yield Suspicion(
            self.name,
            seen,
            fix,
            guess=seconds_in(script, keys),
            changed=script.changed(as_tensors),
            tried="tensors in place of the objects",
            lines=lines,
        )


def _fix(one: Played) -> str:
    """The lines. NCCL takes no tensors of the host; objects it moves to the GPU by itself."""
    if one.act.bytes > _SMALL:
        return _FIX_OF_LARGE
    group = one.call.place.group
    on = ", device='cuda'" if group is not None and group.backend == "nccl" else ""
    lines = _FIXES[one.act.call].replace("{type}", f", dtype=torch.float64{on}")
    return f"where these objects are numbers, send them as a tensor: {lines}"


CAUSE = ObjectCollectives()
