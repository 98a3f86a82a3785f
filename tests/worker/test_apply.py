"""Turning a live DDP object: two gloo ranks train on through many configurations, and everything else stays put."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import weakref
from collections.abc import Iterable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.worker.ddp.arguments import AVAILABLE_ARGUMENTS
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.effects.binding import Binding
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.effects.threads import Threads
from autoddp.worker.gradients.access import add_handler
from autoddp.worker.gradients.accumulation import Accumulation
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.graphs import Graphs
from autoddp.worker.hooks import hook_for
from autoddp.worker.hooks.exact import exact_mean
from autoddp.worker.trial.experiments import Experiments
from autoddp.worker.trial.live_ddp import LiveDdp, effects_of

WORLD, STEPS, WIDTH = 2, 24, 256
EXACT = [
    Configuration({name: value for name, value in values.items() if name in AVAILABLE_ARGUMENTS})
    for values in (
        {"bucket_cap_mb": 0.5},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb_list": [0.5, 0.5, 0.5]},
        {"batched_grad_copy": True, "bucket_cap_mb": 1},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"static_graph": True, "bucket_cap_mb": 512},
        {},
    )
]
LOSSY = [
    Configuration({"hook": "bf16", "bucket_cap_mb": 0.5}),
    Configuration({"hook": "powersgd", "powersgd_rank": 2, "bucket_cap_mb": 0.5}),
    Configuration({"hook": "fp16", "gradient_as_bucket_view": True}),
    Configuration({"hook": "powersgd", "powersgd_rank": 1}),
    AS_WRITTEN,
]


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), *layers, nn.Linear(WIDTH, 4))


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def step_of(ddp: DDP, optimizer: torch.optim.Optimizer, rank: int, step: int, to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none=to_none)
    inputs = data(rank, step)
    (ddp(inputs) - inputs[:, :4]).square().mean().backward()
    optimizer.step()


def train(
    ddp: DDP, rank: int, live: LiveDdp | None = None, turns: Iterable[Configuration] = (), to_none: bool = True
) -> torch.Tensor:
    """STEPS steps, turning before every other one; all parameters in one vector."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    sequence = iter(turns)
    for step in range(STEPS):
        if live is not None and step % 2:
            live.apply(next(sequence))
        step_of(ddp, optimizer, rank, step, to_none)
    return vector(ddp)


def vector(ddp: DDP) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])


def ranks_differ_by(tensor: torch.Tensor) -> float:
    found = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(found, tensor)
    return float((found[0] - found[1]).abs().max())


def trained(rank: int, patch: Patch, live: LiveDdp, untouched: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for to_none in (True, False):
        end = train(DDP(Net(), None, None, 0), rank, live, cycle(EXACT), to_none)
        live.apply(AS_WRITTEN)
        found[f"exact {to_none}"] = float((end - untouched).abs().max()), ranks_differ_by(end)
    end = train(DDP(Net()), rank, live, cycle(LOSSY))
    live.apply(AS_WRITTEN)
    found["lossy"] = float((end - untouched).abs().max()), ranks_differ_by(end)
    gc.collect()
    found["alive afterwards"] = len(patch.alive())
    return found


def in_effect(rank: int, live: LiveDdp) -> list[tuple[int, bool, bool]]:
    """What DDP itself says of its settings under some configurations; its own are cap 25, no view."""
    ddp = DDP(Net(), bucket_cap_mb=25)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    found = []
    for configuration in (AS_WRITTEN, EXACT[0], EXACT[4], AS_WRITTEN):
        live.apply(configuration)
        for step in range(5):
            step_of(ddp, optimizer, rank, step)
        buckets = len(ddp.reducer._get_zeros_like_grad_buckets())
        found.append((buckets, ddp.gradient_as_bucket_view, ddp.static_graph))
    return found


def sampled(rank: int, live: LiveDdp | None) -> list[bool]:
    """Whether DDP's logger has read the times of any pass, after a start and after a turn."""
    ddp = DDP(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    found = []
    for turn in (AS_WRITTEN, EXACT[0]):
        if live is not None:
            live.apply(turn)
        for step in range(4):
            step_of(ddp, optimizer, rank, step)
        found.append(ddp._get_ddp_logging_data().get("iteration", 0) > 0)
    if live is not None:
        live.apply(AS_WRITTEN)
    return found


def carried_over(rank: int, live: LiveDdp) -> dict[str, Any]:
    calls = {"forward hook": 0, "script hook": 0}
    ddp = DDP(Net())
    ddp.note = "the user's"
    ddp.register_forward_hook(lambda *_: calls.update({"forward hook": calls["forward hook"] + 1}))
    state, sixteen = hook_for(Configuration({"hook": "bf16"}), ddp.process_group)

    def script_hook(state, bucket):  # DDP reads a hook's annotations and wants its own types there
        calls["script hook"] += bucket.is_last()
        return sixteen(state, bucket)

    ddp.register_comm_hook(state, script_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    parameters = list(map(id, ddp.parameters()))
    for turn, configuration in enumerate([EXACT[0], Configuration({"hook": "fp16"}), EXACT[1], AS_WRITTEN]):
        live.apply(configuration)
        step_of(ddp, optimizer, rank, turn)
    ddp.eval()
    ddp.require_backward_grad_sync = False
    live.apply(EXACT[0])
    found = {"training": ddp.training, "sync": ddp.require_backward_grad_sync, "note": ddp.note, **calls}
    live.apply(AS_WRITTEN)
    return {**found, "same parameters": list(map(id, ddp.parameters())) == parameters, "type": type(ddp) is DDP}


def with_torchs_hook(rank: int, live: LiveDdp | None) -> torch.Tensor:
    """A training whose script registers one of torch's own hooks, in C++; with `live`, it is turned all the time."""
    ddp = DDP(Net())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    end = train(ddp, rank, live, cycle([*EXACT, *LOSSY]))
    if live is not None:
        live.apply(AS_WRITTEN)
    return end


def with_state_by_bucket(rank: int, live: LiveDdp) -> dict[str, Any]:
    """Whether a hook that keeps something for each bucket, from the second pass on, was ever given others."""
    ddp = DDP(Net(), bucket_cap_mb=0.5)
    calls, sizes = {"passes": 0, "fits": True}, dict[int, int]()

    def script_hook(state, bucket):  # DDP reads a hook's annotations and wants its own types there
        size = bucket.buffer().numel()
        if state["passes"] > 1:
            state["fits"] &= sizes.setdefault(bucket.index(), size) == size
        state["passes"] += bucket.is_last()
        return exact_mean(ddp.process_group, bucket)

    ddp.register_comm_hook(calls, script_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(3):
        step_of(ddp, optimizer, rank, step)
    for configuration in (EXACT[1], AS_WRITTEN):
        live.apply(configuration)
        for step in range(3):
            step_of(ddp, optimizer, rank, step)
    live.apply(AS_WRITTEN)
    return {
        **calls,
        "buckets": len(sizes),
        "differ": ranks_differ_by(vector(ddp)),
        "own": ddp._comm_hooks[0][0] is script_hook,
    }


def with_static_graph_of_its_own(rank: int, live: LiveDdp) -> float:
    """How far the ranks are apart. The script accumulates under no_sync in all steps but the first, as torch needs."""
    ddp = DDP(Net(), static_graph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    step_of(ddp, optimizer, rank, 0)
    for step, configuration in enumerate((EXACT[0], EXACT[1], AS_WRITTEN), start=1):
        live.apply(configuration)
        for _ in range(2):
            with ddp.no_sync():
                ddp(data(rank, step)).square().mean().backward()
            ddp(data(rank, step + 10)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return ranks_differ_by(vector(ddp))


def in_another_group(rank: int, live: LiveDdp) -> float:
    """How far the ranks are apart after a turn, where the script has given each a process group of its own."""
    groups = [dist.new_group([one]) for one in range(WORLD)]
    ddp = DDP(Net())
    ddp._update_process_group(groups[rank])
    live.apply(EXACT[0])
    step_of(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), rank, 0)
    live.apply(AS_WRITTEN)
    return ranks_differ_by(vector(ddp))


def reducers_alive(rank: int, live: LiveDdp) -> int:
    """After a model was turned 40 times."""
    ddp = DDP(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    references = []
    for turn in range(40):
        live.apply(EXACT[turn % len(EXACT)])
        step_of(ddp, optimizer, rank, turn)
        references.append(weakref.ref(ddp.reducer))
    alive = sum(reference() is not None for reference in references)
    live.apply(AS_WRITTEN)
    return alive


def switched_off(rank: int, live: LiveDdp) -> dict[str, Any]:
    ddp = DDP(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    live.reduce(False)
    ddp.require_backward_grad_sync = True  # as scripts that accumulate do
    found = {"sync while off": ddp.require_backward_grad_sync}
    with ddp.no_sync():  # saves the attribute and restores it
        pass
    found["sync after no_sync while off"] = ddp.require_backward_grad_sync
    for step in range(2):
        step_of(ddp, optimizer, rank, step)
    found["off"] = ranks_differ_by(vector(ddp))
    before = vector(ddp)
    live.reduce(True)
    found |= {"on": ranks_differ_by(vector(ddp)), "rank 0 kept": bool((vector(ddp) == before).all())}
    step_of(ddp, optimizer, rank, 2)
    found["after"] = ranks_differ_by(vector(ddp))
    with ddp.no_sync():
        found["no_sync"] = ddp.require_backward_grad_sync
    return {**found, "sync": ddp.require_backward_grad_sync}


def prepared_by_the_script(rank: int, live: LiveDdp) -> dict[str, float]:
    """How far the ranks are apart, with reduction off and on. The script prepares the reducer, as Lightning does."""
    ddp = DDP(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    found = {}
    for name, on in (("off", False), ("on", True)):
        live.reduce(on)
        for step in range(2):
            optimizer.zero_grad()
            inputs = data(rank, step)
            error = (ddp(inputs) - inputs[:, :4]).square().mean()
            if ddp.require_backward_grad_sync:
                ddp.reducer.prepare_for_backward([])
            error.backward()
            optimizer.step()
        found[name] = ranks_differ_by(vector(ddp))
    return found


def passes_not_seen(switch: ReductionSwitch) -> dict[str, int]:
    """How often autoddp is told that the script prepares the reducer, by whether the forward pass before reduces."""
    ddp, found = DDP(Net()), {}
    told: list[object] = []
    switch.script_prepares = told.append
    for name, within in (("reduces", contextlib.nullcontext), ("no_sync", ddp.no_sync)):
        with within():
            error = ddp(data(0, 0)).sum()
        ddp.reducer.prepare_for_backward([])
        error.backward()
        found[name] = len(told)
        told.clear()
    return found


class Apart(nn.Module):
    """Each rank has an adapter and a counter of its own, which DDP is told to ignore, and a transposed weight."""

    _ddp_params_and_buffers_to_ignore = ("adapter", "own")

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3).t())
        self.adapter = nn.Parameter(torch.full((3,), float(rank)))
        self.register_buffer("own", torch.tensor([float(rank)]))
        self.register_buffer("shared", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.adapter) @ self.weight


def kept_apart(rank: int, live: LiveDdp, broadcast_buffers: bool) -> dict[str, list[float]]:
    """Reduction off and on again around a script that lets its ranks differ on purpose."""
    ddp = DDP(Apart(rank), broadcast_buffers=broadcast_buffers)
    live.reduce(False)
    with torch.no_grad():
        ddp.module.weight += rank
        ddp.module.shared += rank
    live.reduce(True)
    return {name: value.flatten().tolist() for name, value in ddp.module.state_dict().items()}


class Named(nn.Linear):
    """Its forward has an argument by a name that autoddp has for the object around it."""

    def forward(self, x: torch.Tensor, ddp: float = 1.0) -> torch.Tensor:
        return super().forward(x) * ddp


def threads(live: LiveDdp) -> list[int]:
    counts = [torch.get_num_threads()]
    for configuration in ({"threads": 3}, {"threads": 2, "bucket_cap_mb": 1}, {}):
        live.apply(Configuration(configuration))
        counts.append(torch.get_num_threads())
    return counts


def checks(rank: int) -> dict[str, Any]:
    untouched, sampled_as_written = train(DDP(Net()), rank), sampled(rank, None)
    rounded = with_torchs_hook(rank, None)
    arguments = inspect.getfullargspec(DDP).args
    patch = Patch()
    switch = ReductionSwitch(patch.of)
    patch.install()
    switch.install()
    switch.learns_again = True
    implicit_no_sync = ImplicitNoSync(switch, patch.alive)
    add_handler(implicit_no_sync)
    counts, binding = Threads(os.environ.get("OMP_NUM_THREADS"), pinned=""), Binding(torch.device("cpu"))
    accumulation, compiling = Accumulation(switch, patch.alive, implicit_no_sync, print), Compiling(patch.alive)
    effects = effects_of(
        patch,
        binding=binding,
        threads=counts,
        implicit_no_sync=implicit_no_sync,
        accumulation=accumulation,
        compiling=compiling,
        graphs=Graphs(patch.alive, switch.reduces),
    )
    live = LiveDdp(patch, switch, effects, compiling, Experiments(patch))
    return {
        "moved": float((untouched - vector(DDP(Net()))).abs().max()),
        "trained": trained(rank, patch, live, untouched),
        "in effect": in_effect(rank, live),
        "sampled": (sampled_as_written, sampled(rank, live)),
        "carried over": carried_over(rank, live),
        "torch's hook": tuple(float((with_torchs_hook(rank, live) - end).abs().max()) for end in (rounded, untouched)),
        "state by bucket": with_state_by_bucket(rank, live),
        "static graph": with_static_graph_of_its_own(rank, live),
        "apart": in_another_group(rank, live),
        "reducers alive": reducers_alive(rank, live),
        "switched off": switched_off(rank, live),
        "prepared": prepared_by_the_script(rank, live),
        "not seen": passes_not_seen(switch),
        "kept apart": {sends: kept_apart(rank, live, sends) for sends in (True, False)},
        "same arguments": inspect.getfullargspec(DDP).args == arguments,
        "named": DDP(Named(2, 2))(torch.ones(1, 2), ddp=0.0).tolist(),
        "threads": threads(live),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(WORLD, checks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("to_none", [True, False])
def test_exact_turns_change_no_bit_of_the_training(ranks: list[dict[str, Any]], to_none: bool) -> None:
    """Two ranks: a sum of two numbers is the same in any order, so not even rounding differs."""
    for found in ranks:
        assert found["moved"] > 0.01
        assert found["trained"][f"exact {to_none}"] == (0.0, 0.0)


def test_lossy_turns_keep_the_ranks_together(ranks: list[dict[str, Any]]) -> None:
    for difference, between_ranks in (found["trained"]["lossy"] for found in ranks):
        assert between_ranks == 0.0
        assert 1e-5 < difference < 0.2


def test_a_turn_takes_effect(ranks: list[dict[str, Any]]) -> None:
    """Buckets, gradient_as_bucket_view, static_graph: as written, cap 0.5, view and static graph, as written."""
    has_views = "gradient_as_bucket_view" in AVAILABLE_ARGUMENTS
    expected = [(1, False, False), (3, False, False), (1, has_views, True), (1, False, False)]
    assert [found["in effect"] for found in ranks] == [expected] * WORLD


def test_a_turn_leaves_the_rest_alone(ranks: list[dict[str, Any]]) -> None:
    expected = {
        "training": False,
        "sync": False,
        "note": "the user's",
        "forward hook": 4,
        "script hook": 4,
        "same parameters": True,
        "type": True,
    }
    assert [found["carried over"] for found in ranks] == [expected] * WORLD


def test_a_hook_of_torchs_own_stays(ranks: list[dict[str, Any]]) -> None:
    for as_written, exact in (found["torch's hook"] for found in ranks):
        assert as_written == 0
        assert exact > 1e-5  # else it would do nothing


def test_a_hook_that_keeps_something_for_each_bucket_is_given_no_others(ranks: list[dict[str, Any]]) -> None:
    """As torch's PowerSGD does. In the first pass after a turn the mean is exact."""
    expected = {"passes": 3 + 2 + 2, "fits": True, "buckets": 3, "differ": 0.0, "own": True}
    assert [found["state by bucket"] for found in ranks] == [expected] * WORLD


def test_a_static_graph_of_the_scripts_own_is_learned_again_under_no_sync(ranks: list[dict[str, Any]]) -> None:
    assert [found["static graph"] for found in ranks] == [0.0] * WORLD


def test_another_process_group_stays(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["apart"] > 1e-4


def test_old_reducers_go(ranks: list[dict[str, Any]]) -> None:
    """With a reducer go its hooks on the parameters: 40 turns leave one."""
    assert [found["reducers alive"] for found in ranks] == [1] * WORLD


def test_models_are_held_weakly(ranks: list[dict[str, Any]]) -> None:
    assert [found["trained"]["alive afterwards"] for found in ranks] == [0] * WORLD


def test_reduction_is_switched_off_and_on(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(found["switched off"] for found in ranks):
        # What the script reads is its own value, whatever DDP is told.
        assert (found["sync while off"], found["sync after no_sync while off"]) == (True, True)
        assert (found["sync"], found["no_sync"]) == (True, False)
        assert found["off"] > 1e-3
        assert (found["on"], found["after"]) == (0.0, 0.0)
        assert found["rank 0 kept"] is (rank == 0)


def test_reduction_is_off_also_where_the_script_prepares_the_reducer(ranks: list[dict[str, Any]]) -> None:
    for found in (found["prepared"] for found in ranks):
        assert found["off"] > 1e-3
        assert found["on"] == 0.0


def test_passes_are_not_seen_where_the_script_prepares_the_reducer_after_no_sync(ranks: list[dict[str, Any]]) -> None:
    """As torch.distributed.pipelining does, and Accelerate in `trigger_sync_in_backward`."""
    assert [found["not seen"] for found in ranks] == [{"reduces": 0, "no_sync": 1}] * WORLD


@pytest.mark.parametrize("sends", [True, False])
def test_what_ddp_does_not_synchronise_stays_each_ranks_own(ranks: list[dict[str, Any]], sends: bool) -> None:
    for rank, found in enumerate(found["kept apart"][sends] for found in ranks):
        assert found["weight"] == [1.0] * 6  # rank 0's, though it is not contiguous
        assert (found["adapter"], found["own"]) == ([float(rank)] * 3, [float(rank)])
        assert found["shared"] == [0.0 if sends else float(rank)]


def test_a_script_finds_the_arguments_that_torchs_constructor_has(ranks: list[dict[str, Any]]) -> None:
    """As scripts do that work with several versions of torch, and leave out what they do not find."""
    assert [found["same arguments"] for found in ranks] == [True] * WORLD


def test_a_model_may_have_arguments_of_any_name(ranks: list[dict[str, Any]]) -> None:
    assert [found["named"] for found in ranks] == [[[0.0, 0.0]]] * WORLD


def test_only_what_torch_has_is_tried() -> None:
    assert {configuration.rung for configuration in EXACT} == {Rung.EXACT}
    assert "bucket_cap_mb" in AVAILABLE_ARGUMENTS
    assert len(set(EXACT)) >= 5


def test_threads_turn_and_return(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["threads"] for rank in ranks):
        assert found[1:] == [3, 2, found[0]]


def test_no_time_is_read_inside_timed_blocks(ranks: list[dict[str, Any]]) -> None:
    """In each reducer's first ten passes torch would wait for the device to read it."""
    for found in ranks:
        assert found["sampled"] == ([True, True], [False, False])
