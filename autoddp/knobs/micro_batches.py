"""Knobs that reduce gradients less often: once for all backward passes of a step, or once for several steps."""

from __future__ import annotations

from autoddp.knobs.base import Knob, Phase, Reach, Rung, whole_number_between
from autoddp.knobs.ddp_arguments import FIND_UNUSED, KEEPS_GRADIENTS, STATIC_GRAPH
from autoddp.knobs.job import OWN_HOOK, SPARSE, FirstLook

_MOST = 4096
_REPLACES = (STATIC_GRAPH.name,)  # DDP takes a static graph to reduce after every backward pass

CHANGES_GRADIENTS = "the script reads and changes gradients itself"
READS_GRADIENTS = "the script reads gradients itself"
DISCARDS_GRADIENTS = "the script reads, clears or changes gradients between two backward passes of a step"
FINDS_UNUSED = "find_unused_parameters is set, and DDP keeps what a pass has used until it reduces"
STEPS_WITHOUT_GRADIENTS = "the optimizer changes parameters that have no gradients"
STEPS_OTHERS = "an optimizer also steps what DDP does not reduce"
_JOINS = "the script uses join()"


def _why_no_implicit_no_sync(look: FirstLook) -> str:
    counts = {count for one in look.steps for count in one.forwards}
    if len(look.arguments) > 1 or any(one.steps_by_closure for one in look.steps):
        return "backward passes do not belong to one step of one model (several DDP models, or a closure)"
    if look.script_hook:
        return OWN_HOOK
    if look.sparse:
        return SPARSE
    if any(one.joins for one in look.steps):
        return _JOINS
    if any(one.discards_gradients for one in look.steps):
        return DISCARDS_GRADIENTS
    if look.passes(FIND_UNUSED):
        return FINDS_UNUSED
    if any(one.changes_gradients for one in look.steps):
        return CHANGES_GRADIENTS
    if len(counts) != 1:
        return "steps differ in their number of reductions"
    if max(counts) < 2:
        return "each step has one reduction"
    return READS_GRADIENTS if any(one.reads_gradients for one in look.steps) else ""


def _why_no_accumulation(look: FirstLook) -> str:
    if any(one.steps_by_closure for one in look.steps):
        return "the optimizer runs backward itself (a closure)"
    if look.script_hook:
        return OWN_HOOK
    if any(one.joins for one in look.steps):
        return _JOINS
    if any(one.discards_gradients for one in look.steps):
        return DISCARDS_GRADIENTS
    if any(one.keeps_gradients for one in look.steps):
        return KEEPS_GRADIENTS
    if not all(one.one_optimizer for one in look.steps):
        return "no one optimizer steps all that DDP reduces"
    if any(one.steps_others for one in look.steps):
        return STEPS_OTHERS
    if look.sparse:
        return SPARSE
    if any(one.changes_gradients or one.changes_gradients_later for one in look.steps):
        return CHANGES_GRADIENTS
    return "" if all(one.clears for one in look.steps) else "the script clears gradients without zero_grad"


DEFER_REDUCTIONS = Knob[int](
    name="defer_reductions",
    says="backward passes of a step, of which only the last one reduces: nothing reads the gradients before it",
    does=lambda passes: f"one reduction for {passes} backward passes",
    check=whole_number_between(2, _MOST),
    reach=Reach.PROCESS,
    candidates=lambda job: [round(job.micro_batches)],
    why_not=_why_no_implicit_no_sync,
    replaces=_REPLACES,
    could_part_ranks=True,
)

ACCUMULATE_STEPS = Knob[int](
    name="accumulate_steps",
    says="steps of the script that become one, by the mean of their gradients: the batch is so many times as large",
    does=lambda steps: f"{steps} of your steps in one",
    check=whole_number_between(2, _MOST),
    reach=Reach.PROCESS,
    rung=Rung.BATCH,
    phase=Phase.LAST,  # the candidates are `step_counts`, which depend on what the user allows
    why_not=_why_no_accumulation,
    option="--accumulate-up-to",
    replaces=_REPLACES,
    could_part_ranks=True,
)


def step_counts(most: int) -> tuple[int, ...]:
    """The values of `accumulate_steps` worth trying if the user allows up to `most`; the largest first.

    >>> step_counts(12)
    (12, 8, 4, 2)
    >>> step_counts(1)
    ()
    """
    powers = [2**exponent for exponent in range(1, most.bit_length()) if 2**exponent < most]
    return (most, *reversed(powers)) if most > 1 else ()


def larger_batch(steps: int) -> str:
    """A clause that tells the user what making `steps` steps of the script one means for training; "" for one step."""
    if steps == 1:
        return ""
    return (
        f"; {steps} steps of the script become one: the batch is {steps} times as large, the optimizer steps {steps} "
        "times less often, and the learning rate, which stays as it is, is yours to decide"
    )
