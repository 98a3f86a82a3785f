"""The configurations worth trying on one rung of one job, and the guesses to start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.knobs.buckets import caps, shrinking_plans
from autoddp.knobs.hook import POWERSGD_BATCHED, POWERSGD_FACTORS, POWERSGD_RANK, POWERSGD_RANKS
from autoddp.knobs.micro_batches import DEFER_REDUCTIONS
from autoddp.units import MIB
from autoddp.wire import JobFacts

_FIRST_BUCKET_MIB = 1.0  # DDP's default puts that much into one bucket: cutting less only adds latency
_MANY_SHAPES = 8  # matrices of one shape share a product anyway: only where shapes are many is there one to save
_LARGE_MIB = 100.0  # below it the factors are so small that latency, not their bytes, is what they cost
_SWITCHES = ("gradient_as_bucket_view", "batched_grad_copy", "static_graph")


@dataclass(frozen=True)
class Space:
    """All configurations of `rung` for a job with these facts. Parameters are categorical, named after their knobs."""

    rung: Rung
    facts: JobFacts
    held: Configuration = AS_WRITTEN
    """Values that every configuration of this space has, because they were found before."""
    likely_cap: float | None = None
    """MiB; the cap that a measured link speaks for: tried first."""

    @property
    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Parameter → its values; a switch that is off is as written."""
        known = set(self.facts.knobs)
        found: dict[str, tuple[Any, ...]] = {"buckets": self._buckets(known)}
        found |= {name: (False, True) for name in _SWITCHES if name in known}
        if DEFER_REDUCTIONS.name in known:
            found[DEFER_REDUCTIONS.name] = (1, round(self.facts.micro_steps))
        if self.rung is Rung.NEAR:
            found["hook"] = ("fp16", "bf16")
        if self.rung is Rung.LOSSY:
            found |= self._powersgd()
        return found

    def _powersgd(self) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {POWERSGD_RANK.name: POWERSGD_RANKS}
        if POWERSGD_BATCHED.name in self.facts.knobs and self.facts.matrix_shapes >= _MANY_SHAPES:
            found[POWERSGD_BATCHED.name] = (False, True)
        if POWERSGD_FACTORS.name in self.facts.knobs and self.facts.gradient_bytes >= _LARGE_MIB * MIB:
            found[POWERSGD_FACTORS.name] = ("as they are", "bf16")
        return found

    @property
    def empty(self) -> bool:
        """Whether this rung offers nothing to try here."""
        if self.rung is not Rung.EXACT:
            return "hook" not in self.facts.knobs
        return all(len(values) < 2 for values in self.choices.values())

    def _buckets(self, known: set[str]) -> tuple[str, ...]:
        mib = self.facts.gradient_bytes / MIB
        labels = ["as written"]
        if mib <= _FIRST_BUCKET_MIB and not {"bucket_cap_mb", "bucket_cap_mb_list"} & set(self.facts.ddp_arguments):
            return tuple(labels)
        if "bucket_cap_mb" in known:
            labels += [f"cap {cap:g}" for cap in caps(mib)]
        if "bucket_cap_mb_list" in known:
            labels += [f"plan {' '.join(f'{size:g}' for size in plan)}" for plan in shrinking_plans(mib)]
        return tuple(labels)

    def configuration(self, chosen: dict[str, Any]) -> Configuration:
        """The configuration that a choice of parameters stands for."""
        values: dict[str, Any] = {**self.held, **{name: True for name in _SWITCHES if chosen.get(name)}}
        kind, _, sizes = str(chosen["buckets"]).partition(" ")
        if kind == "cap":
            values["bucket_cap_mb"] = float(sizes)
        elif kind == "plan":
            values["bucket_cap_mb_list"] = [float(size) for size in sizes.split()]
        if chosen.get(DEFER_REDUCTIONS.name, 1) > 1:
            values[DEFER_REDUCTIONS.name] = chosen[DEFER_REDUCTIONS.name]
            values.pop("static_graph", None)  # a static graph has the same reductions after every backward
        if self.rung is Rung.NEAR:
            values["hook"] = chosen["hook"]
        if self.rung is Rung.LOSSY:
            values |= {"hook": "powersgd", POWERSGD_RANK.name: chosen[POWERSGD_RANK.name]}
            if chosen.get(POWERSGD_BATCHED.name):
                values[POWERSGD_BATCHED.name] = True
            if chosen.get(POWERSGD_FACTORS.name) == "bf16":
                values[POWERSGD_FACTORS.name] = "bf16"
        return Configuration(values)

    def guesses(self) -> list[dict[str, Any]]:
        """Where to start, the most promising first: the extremes of each knob, then their combinations.

        Few large buckets pay latency once and suit compressed gradients; a shrinking plan leaves a small exposed tail;
        the switches save copies.
        """
        buckets = self.choices["buckets"]
        whole = next((label for label in reversed(buckets) if label.startswith("cap")), buckets[0])
        tail = next((label for label in buckets if label.startswith("plan")), buckets[0])
        quarter = _quarter(buckets)
        view, batched = {"gradient_as_bucket_view": True}, {"batched_grad_copy": True}
        if self.rung is Rung.EXACT:
            rows = [{"buckets": buckets[0], **view}, {"buckets": tail, **view}, {"buckets": buckets[0], **batched},
                    {"buckets": whole, **view}, {"buckets": quarter, **view}]  # fmt: skip
        elif self.rung is Rung.NEAR:
            rows = [{"hook": "bf16", "buckets": quarter, **view}, {"hook": "fp16", "buckets": quarter, **view},
                    {"hook": "bf16", "buckets": tail, **view}, {"hook": "bf16", "buckets": whole, **view}]  # fmt: skip
        else:
            rows = [{"powersgd_rank": 1, "buckets": whole, **view}, {"powersgd_rank": 1, "buckets": quarter, **view},
                    {"powersgd_rank": 2, "buckets": whole, **view}]  # fmt: skip
            switched = {POWERSGD_BATCHED.name: True, POWERSGD_FACTORS.name: "bf16"}
            rows += [{**rows[0], name: value} for name, value in switched.items() if name in self.choices]
        label = f"cap {self.likely_cap:g}" if self.likely_cap else ""
        if label in buckets:
            rows = [{**rows[0], "buckets": label}, *rows]
        return [self._complete(row) for row in rows]

    def _complete(self, row: dict[str, Any]) -> dict[str, Any]:
        """A guess with a value for every parameter, and none that this job lacks."""
        complete = {name: row.get(name, values[0]) for name, values in self.choices.items()}
        if DEFER_REDUCTIONS.name in complete:  # what is not sent is fastest
            complete[DEFER_REDUCTIONS.name] = self.choices[DEFER_REDUCTIONS.name][-1]
        return complete


def _quarter(buckets: tuple[str, ...]) -> str:
    """The cap that cuts the gradients into about four buckets."""
    found = [label for label in buckets if label.startswith("cap")]
    # The last cap holds all gradients and each before it is half as large: the third from the end is a quarter.
    return found[max(0, len(found) - 3)] if found else buckets[0]
