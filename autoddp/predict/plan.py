"""The buckets into which DDP cuts a model's gradients: the same cuts as those of DDP itself.

    order = [2, 1, 0]                                        # in which the gradients become ready
    buckets(gradients, order, Cuts.of({"bucket_cap_mb": "5"}, Configuration()))

In the first step DDP notes the order in which the gradients become ready, and then cuts them anew in that order. So the
limits count from the gradient that is ready first. Without a cap from the script or the configuration, the first bucket
ends at 1 MiB and all others at 25 MiB; with a cap, all buckets end at it; a list has one limit for each bucket, and the
last one for all that follow. A bucket ends with the gradient with which it reaches its limit, so it may be larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoddp.codec import Struct, decode
from autoddp.knobs import Configuration
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB, BUCKET_CAP_MB_LIST, FIND_UNUSED, STATIC_GRAPH
from autoddp.units import MIB

_FIRST = 1 * MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
_CAP = 25 * MIB
_MOST_MIB = 1e12  # more than any model has


class Gradient(Struct, frozen=True, forbid_unknown_fields=True):
    """The gradient of one parameter."""

    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        """The number of its values."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def width(self) -> int:
        """Bytes of one value."""
        return self.bytes // max(1, self.elements)


@dataclass(frozen=True)
class Cuts:
    """The rule by which DDP ends its buckets."""

    limits: tuple[int, ...] = (_FIRST, _CAP)
    """Bytes at which the first bucket ends, the second, and so on; the last is that of all further buckets."""
    rebuilt: bool = True
    """Whether DDP cuts in the order of the first step; if not, in the order of the parameters, last bucket first."""

    @classmethod
    def of(cls, arguments: Mapping[str, str], configuration: Configuration) -> Cuts:
        """The cuts of a script that passes `arguments` (as text) to DDP, under `configuration`.

        ValueError for an argument that is not understood.
        """
        static = bool(STATIC_GRAPH.of(configuration)) or arguments.get(STATIC_GRAPH.name) == "True"
        rebuilt = static or arguments.get(FIND_UNUSED) != "True"
        cap, plan = BUCKET_CAP_MB.of(configuration), BUCKET_CAP_MB_LIST.of(configuration)
        if cap is None and plan is None:
            cap, plan = _number(arguments.get(BUCKET_CAP_MB.name)), _numbers(arguments.get(BUCKET_CAP_MB_LIST.name))
        if plan:
            return cls(tuple(int(entry * MIB) for entry in plan), rebuilt)
        return cls((int(cap * MIB),), rebuilt) if cap is not None else cls(rebuilt=rebuilt)


def buckets(gradients: Sequence[Gradient], order: Sequence[int], cuts: Cuts) -> list[list[int]]:
    """The places of the gradients in each bucket, in the order in which DDP launches the buckets."""
    if cuts.rebuilt:
        return _cut(gradients, order, cuts.limits)
    found = _cut(gradients, range(len(gradients)), cuts.limits)
    return sorted(found, key=min, reverse=True)


def _cut(gradients: Sequence[Gradient], order: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
    """Cuts as torch's compute_bucket_assignment_by_size: gradients of different types are in different buckets."""
    found: list[list[int]] = []
    open_buckets: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    ended: dict[int, int] = {}
    for place in order:
        kind = gradients[place].width
        open_buckets.setdefault(kind, []).append(place)
        sizes[kind] = sizes.get(kind, 0) + gradients[place].bytes
        if sizes[kind] >= limits[min(ended.get(kind, 0), len(limits) - 1)]:
            found.append(open_buckets.pop(kind))
            ended[kind] = ended.get(kind, 0) + 1
            sizes[kind] = 0
    return found + list(open_buckets.values())


def _number(text: str | None) -> float | None:
    number = None if text is None or text == "None" else float(text)
    if number is not None and not 0 < number <= _MOST_MIB:
        raise ValueError(f"{text}: no size of a bucket")
    return number


def _numbers(text: str | None) -> tuple[float, ...] | None:
    if text is None or text == "None":
        return None
    found = decode(text.replace("(", "[").replace(",)", "]").replace(")", "]"), list)
    return tuple(_number(str(entry)) or 0.0 for entry in found)
