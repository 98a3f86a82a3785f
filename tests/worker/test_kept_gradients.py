"""Scripts that hold gradients over a backward pass, or clear them in the middle of a step, are told from others.

What comes of them under each knob is in the matrix of campaigns/equality.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import FirstLook, ObservedSteps, why_left_out
from autoddp.knobs.job import OWN_HOOK, SPARSE
from autoddp.worker.observe.first_steps import ByHand, KeepsGradients

Parameters = list[nn.Parameter]
Step = Callable[["Script"], None]


class Script:
    """A model, its optimizer, and what it holds from step to step."""

    def __init__(self) -> None:
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        self.parameters: Parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.held: list[torch.Tensor] = []

    def backward(self) -> None:
        self.model(torch.ones(2, 3)).square().sum().backward()


def plain(script: Script) -> None:
    script.optimizer.zero_grad()
    script.backward()


def zeros(script: Script) -> None:
    script.optimizer.zero_grad(set_to_none=False)
    script.backward()


def micro_batches(script: Script, clear: Step = plain) -> None:
    clear(script)
    script.backward()


def clips(script: Script) -> None:
    plain(script)
    nn.utils.clip_grad_norm_(script.model.parameters(), 0.1)


def clones(script: Script) -> None:
    plain(script)
    script.held = [p.grad.clone() for p in script.parameters if p.grad is not None]


def flat_copy(script: Script) -> None:
    plain(script)
    script.held = [nn.utils.parameters_to_vector([p.grad for p in script.parameters if p.grad is not None])]


def replaces(script: Script) -> None:
    plain(script)
    for p in script.parameters:
        assert p.grad is not None
        p.grad = p.grad * 0.5


def references(script: Script) -> None:
    plain(script)
    script.held = [p.grad for p in script.parameters if p.grad is not None]


def one_reference(script: Script) -> None:
    plain(script)
    script.held = [p.grad for p in script.parameters[1:2] if p.grad is not None]


def references_to_zeros(script: Script) -> None:
    zeros(script)
    script.held = [p.grad for p in script.parameters if p.grad is not None]


def detached(script: Script) -> None:
    plain(script)
    script.held = [p.grad.detach() for p in script.parameters if p.grad is not None]


def rows(script: Script) -> None:
    plain(script)
    script.held = [p.grad.view(-1)[:1] for p in script.parameters if p.grad is not None]


def data(script: Script) -> None:
    plain(script)
    script.held = [p.grad.data for p in script.parameters if p.grad is not None]


def gives_other_memory(script: Script) -> None:
    """Under `gradient_as_bucket_view` the tensor is the one by which DDP finds the gradient in its bucket."""
    plain(script)
    for p in script.parameters:
        assert p.grad is not None
        p.grad.data = p.grad.data * 0.5


def parts_of_one_tensor(script: Script) -> None:
    if not script.held:
        sizes = [p.numel() for p in script.parameters]
        script.held = [torch.zeros(sum(sizes))]
        for p, part in zip(script.parameters, script.held[0].split(sizes), strict=True):
            p.grad = part.view_as(p)
    script.held[0].zero_()
    script.backward()


def in_a_hook(script: Script) -> None:
    """Holds gradients within the pass alone."""

    def hold(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        script.held.append(parameter.grad)

    handles = [p.register_post_accumulate_grad_hook(hold) for p in script.parameters]
    plain(script)
    for handle in handles:
        handle.remove()
    script.held.clear()


def clears_in_between(script: Script) -> None:
    clones(script)
    plain(script)


def sets_to_zero_in_between(script: Script) -> None:
    zeros(script)
    zeros(script)


def sets_data_to_zero_in_between(script: Script) -> None:
    """The version counter of a gradient does not see that."""
    plain(script)
    for p in script.parameters:
        assert p.grad is not None
        p.grad.data.zero_()
    script.backward()


def keeps(step: Step) -> bool:
    script = Script()
    watch = KeepsGradients(script.parameters)
    for _ in range(4):
        step(script)
        watch.reads()
        script.optimizer.step()
    watch.stop()
    assert not any(p._post_accumulate_grad_hooks for p in script.parameters)
    return watch.found


@pytest.mark.parametrize("step", [plain, zeros, micro_batches, clips, clones, flat_copy, replaces, clears_in_between])
def test_a_script_that_holds_no_gradients(step: Step) -> None:
    assert not keeps(step)


HOLD = [references, one_reference, references_to_zeros, detached, rows, data, parts_of_one_tensor, in_a_hook]
HOLD += [gives_other_memory]


@pytest.mark.parametrize("step", HOLD)
def test_a_script_that_holds_gradients_is_seen(step: Step) -> None:
    assert keeps(step)


def watched(step: Step, script: Script | None = None) -> ByHand:
    script = script or Script()
    watch = ByHand(script.parameters)
    for _ in range(3):
        step(script)
        watch.reads()
        script.optimizer.step()
    watch.stop()
    return watch


@pytest.mark.parametrize("step", [plain, zeros, micro_batches, clones])
def test_whole_steps_discard_nothing(step: Step) -> None:
    watch = watched(step)
    assert not watch.discards
    assert not watch.found


@pytest.mark.parametrize("step", [clears_in_between, sets_to_zero_in_between, sets_data_to_zero_in_between])
def test_clearing_between_two_backward_passes_of_a_step_is_seen(step: Step) -> None:
    watch = watched(step)
    assert watch.discards
    assert watch.found


@pytest.mark.parametrize("step", [micro_batches, partial(micro_batches, clear=zeros), sets_to_zero_in_between])
def test_gradients_that_ddp_moves_to_new_buckets_are_not_discarded(step: Step, alone: dist.ProcessGroup) -> None:
    """Before its second pass DDP makes its buckets anew; all gradients of a bucket have one version."""
    script = Script()
    script.model = DDP(script.model, gradient_as_bucket_view=True)
    watch = watched(step, script)
    assert watch.discards == (step is sets_to_zero_in_between)


def test_what_a_script_does_after_a_function_of_torch_has_read_is_told_apart() -> None:
    script = Script()
    watch = ByHand(script.parameters)
    for changes in (False, True):
        plain(script)
        watch.reads()
        nn.utils.clip_grad_norm_(script.parameters, 0.1)
        watch.has_read()
        if changes:
            for p in script.parameters:
                assert p.grad is not None
                p.grad.mul_(2)
        plain(script)  # drops that step, whose gradients torch has read as they should be
        assert not watch.discards
        watch.reads()
        watch.has_read()
        if changes:
            script.optimizer.zero_grad(set_to_none=False)
        assert watch.reads() == changes
    assert (watch.found, watch.found_later) == (False, True)
    watch.stop()


def test_what_is_held_by_the_optimizer_is_no_gradient() -> None:
    """Its state begins as a copy."""
    for kind in (torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.LBFGS):
        script = Script()
        optimizer = kind(script.parameters, lr=0.01)
        watch = KeepsGradients(script.parameters)
        for _ in range(3):

            def closure(script: Script = script) -> float:
                plain(script)
                return 1.0

            optimizer.step(closure)
        assert not watch.found, kind
        watch.stop()


def left_out(one: ObservedSteps, arguments: dict[str, bool] | None = None, **more: bool) -> dict[str, str]:
    available = frozenset({"gradient_as_bucket_view"})
    options = frozenset({"--cuda-graphs", "--accumulate-up-to"})
    return why_left_out(
        FirstLook([one], frozenset({"GPU"}), "2", available, [arguments or {}], options=options, **more)  # type: ignore[arg-type]
    )


def observed(**facts: bool) -> ObservedSteps:
    return ObservedSteps(
        is_static=True,
        forwards=(2, 2),
        steps_by_closure=False,
        clears=True,
        one_optimizer=True,
        why_no_graphs={"model": ""},
        **facts,  # type: ignore[arg-type]
    )


def test_which_knobs_such_a_script_cannot_have() -> None:
    asked = ("gradient_as_bucket_view", "cuda_graphs", "accumulate_steps", "defer_reductions")
    assert not set(asked) & set(left_out(observed()))
    found = left_out(observed(keeps_gradients=True))
    assert {name for name in asked if "keeps gradients" in found.get(name, "")} == set(asked[:3])
    found = left_out(observed(discards_gradients=True))
    assert {name for name in asked if "clears or changes" in found.get(name, "")} == set(asked[2:])
    found = left_out(observed(), sparse=True)
    assert {name for name in asked if found.get(name) == SPARSE} >= set(asked[2:])
    found = left_out(observed(), script_hook=True)
    assert {name for name in asked if found.get(name) == OWN_HOOK} >= set(asked[2:])


def test_a_script_that_sets_the_argument_itself_keeps_it() -> None:
    found = left_out(observed(keeps_gradients=True), {"gradient_as_bucket_view": True})
    assert "gradient_as_bucket_view" not in found
    assert "cuda_graphs" not in found
