"""Configurations: values checked by their knobs, compared and printed the same way round."""

from __future__ import annotations

import inspect
import json

import pytest
from torch.nn.parallel import DistributedDataParallel

from autoddp.knobs import AS_WRITTEN, BY_NAME, KNOBS, Configuration, Reach, Rung
from autoddp.knobs.ddp_arguments import caps, shrinking_plans

GOOD = {
    # values, rung, as one reads them
    "as written": ({}, "exact", "as written"),
    "cap": ({"bucket_cap_mb": 50}, "exact", "bucket_cap_mb=50"),
    "plan": ({"bucket_cap_mb_list": [4, 2, 0.5]}, "exact", "bucket_cap_mb_list=[4, 2, 0.5]"),
    "switches": (
        {"static_graph": False, "gradient_as_bucket_view": True, "batched_grad_copy": True},
        "exact",
        "gradient_as_bucket_view=true batched_grad_copy=true static_graph=false",
    ),
    "near": ({"hook": "fp16", "bucket_cap_mb": 0.5}, "near", 'bucket_cap_mb=0.5 hook="fp16"'),
    "own buffers": ({"broadcast_buffers": False}, "near", "broadcast_buffers=false"),
    "lossy": (
        {"powersgd_start_step": 0, "powersgd_rank": 2, "hook": "powersgd"},
        "lossy",
        'hook="powersgd" powersgd_rank=2 powersgd_start_step=0',
    ),
}

BAD = [
    ({"buket_cap_mb": 1}, "unknown knob 'buket_cap_mb' (did you mean 'bucket_cap_mb'?)"),
    ({"zzz": 1}, "unknown knob 'zzz'"),
    ({"bucket_cap_mb": 0.4}, "bucket_cap_mb = 0.4: must be a number from 0.5 to 100000 MiB"),
    ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb = NaN: must be a number from 0.5 to 100000 MiB"),
    ({"bucket_cap_mb": True}, "bucket_cap_mb = true: must be a number from 0.5 to 100000 MiB"),
    ({"bucket_cap_mb": "50"}, 'bucket_cap_mb = "50": must be a number from 0.5 to 100000 MiB'),
    ({"bucket_cap_mb_list": []}, "bucket_cap_mb_list = []: must be a list of 1 to 32 sizes from 0.5 to 100000 MiB"),
    (
        {"bucket_cap_mb_list": [1, 0]},
        "bucket_cap_mb_list = [1, 0]: must be a list of 1 to 32 sizes from 0.5 to 100000 MiB",
    ),
    ({"bucket_cap_mb_list": 5}, "bucket_cap_mb_list = 5: must be a list of 1 to 32 sizes from 0.5 to 100000 MiB"),
    (
        {"bucket_cap_mb": 1, "bucket_cap_mb_list": [1]},
        "bucket_cap_mb_list: excludes bucket_cap_mb, keep one of them",
    ),
    ({"static_graph": 1}, "static_graph = 1: must be true or false"),
    ({"broadcast_buffers": True}, "broadcast_buffers = true: must be false"),
    ({"broadcast_buffers": 0}, "broadcast_buffers = 0: must be false"),
    ({"hook": "fp8"}, 'hook = "fp8": must be one of "fp16", "bf16", "powersgd"'),
    ({"hook": "powersgd"}, 'hook = "powersgd": needs powersgd_rank beside it'),
    ({"powersgd_rank": 1}, 'powersgd_rank: needs hook = "powersgd" beside it'),
    ({"hook": "bf16", "powersgd_start_step": 1}, 'powersgd_start_step: needs hook = "powersgd" beside it'),
    ({"hook": "powersgd", "powersgd_rank": 0}, "powersgd_rank = 0: must be a whole number from 1 to 64"),
    ({"hook": "powersgd", "powersgd_rank": 1.0}, "powersgd_rank = 1.0: must be a whole number from 1 to 64"),
]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_one(name: str) -> None:
    values, rung, text = GOOD[name]
    found = Configuration(values)
    assert found.rung is Rung(rung)
    assert str(found) == text
    assert Configuration(json.loads(json.dumps(found.plain()))) == found
    assert eval(repr(found)) == found


@pytest.mark.parametrize(("values", "line"), BAD, ids=[line.partition(":")[0] for _, line in BAD])
def test_a_bad_one(values: dict[str, object], line: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        Configuration(values)
    assert str(caught.value) == line


def test_order_and_container_do_not_matter() -> None:
    one = Configuration({"bucket_cap_mb_list": [2, 1], "static_graph": True, "hook": "bf16"})
    other = Configuration({"hook": "bf16", "static_graph": True, "bucket_cap_mb_list": (2, 1)})
    assert one == other
    assert hash(one) == hash(other)
    caps_alike = (Configuration({"bucket_cap_mb": 1}), Configuration({"bucket_cap_mb": 1.0}))
    assert len({one, other, AS_WRITTEN, *caps_alike}) == 3


def test_with_values_checks_and_leaves_the_first_alone() -> None:
    first = Configuration({"hook": "bf16"})
    assert first.with_values(hook="fp16", static_graph=True) == {"hook": "fp16", "static_graph": True}
    assert first == {"hook": "bf16"}
    with pytest.raises(ValueError, match="must be one of"):
        first.with_values(hook="none")


NOT_IN_EACH_TORCH = {"bucket_cap_mb_list", "batched_grad_copy"}


def test_what_goes_to_ddp_is_an_argument_of_it() -> None:
    everything = Configuration({"bucket_cap_mb": 1, "static_graph": True, "hook": "powersgd", "powersgd_rank": 1})
    assert everything.ddp_arguments == {"bucket_cap_mb": 1, "static_graph": True}
    arguments = inspect.signature(DistributedDataParallel.__init__).parameters
    assert {knob.name for knob in KNOBS if knob.reach is Reach.DDP} <= set(arguments) | NOT_IN_EACH_TORCH
    assert not {knob.name for knob in KNOBS if knob.reach is not Reach.DDP} & set(arguments)


def test_every_knob_speaks_one_line() -> None:
    assert len(BY_NAME) == len(KNOBS)
    assert all(knob.says.strip() == knob.says and "\n" not in knob.says and knob.says for knob in KNOBS)


@pytest.mark.parametrize(
    ("rung", "allowed"), [("exact", "exact"), ("near", "exact near"), ("lossy", "exact near lossy")]
)
def test_a_rung_allows_those_below(rung: str, allowed: str) -> None:
    assert [other.value for other in Rung if Rung(rung).allows(other)] == allowed.split()


@pytest.mark.parametrize("mib", [0.01, 0.5, 3.0, 24.0, 1200.0, 30_000.0])
def test_caps_and_plans_are_good_values_and_not_wasteful(mib: float) -> None:
    for cap in caps(mib):
        assert Configuration({"bucket_cap_mb": cap})
    assert sum(cap >= mib for cap in caps(mib)) <= 1  # a second one would give the same single bucket
    for plan in shrinking_plans(mib):
        assert Configuration({"bucket_cap_mb_list": plan})
        assert sum(plan) >= mib
        assert sum(plan[1:]) < mib  # none of its buckets stays empty
        assert list(plan) == sorted(plan, reverse=True)
