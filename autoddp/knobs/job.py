"""What is known of a job: from its first steps, to decide which knobs it can have, and for choosing values to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

SPARSE = "the model has sparse gradients"
OWN_HOOK = "the script registers a communication hook of its own"
PARTED = "as the script is written, the ranks have different parameters after a few steps"
NEVER_REDUCES = "the script's first 20 steps reduce no gradients through DDP"
OWN_MODELS = (
    f"{NEVER_REDUCES}, and its ranks have different parameters then: each rank trains a model of its own, unless the "
    "script averages them later"
)


@dataclass(frozen=True, kw_only=True)
class ObservedSteps:
    """What was observed in the script's first steps on one rank."""

    is_static: bool
    """Every gradient became ready once per step, always in the same order."""
    forwards: tuple[int, ...]
    """For each step, the number of forward passes that reduce, over all DDP objects."""
    steps_by_closure: bool
    """The optimizer runs the backward pass itself."""
    clears: bool
    """The script calls `zero_grad`."""
    one_optimizer: bool
    """One optimizer updates all parameters that DDP reduces."""
    why_no_graphs: dict[str, str]
    """Mode of `cuda_graphs` → why it is impossible, "" if it is possible; empty if CUDA graphs were not asked for."""
    changes_gradients: bool = False
    """The script changes gradients itself, before any function of torch reads them."""
    changes_gradients_later: bool = False
    """The script changes gradients itself between a function of torch that reads them and the optimizer's step."""
    steps_others: bool = False
    """An optimizer steps parameters that no DDP object reduces."""
    joins: bool = False
    """The script trains inside `join()`."""
    divides_by_those_left: bool = False
    """Inside `join()`, DDP divides gradients by the number of ranks that still have inputs."""
    compiled: bool = False
    """torch.compile compiles a model, a part of one, or a function around it."""
    uses_all: bool = False
    """Every gradient became ready in each step."""
    discards_gradients: bool = False
    """The script reads, clears or changes gradients between two backward passes of a step."""
    keeps_gradients: bool = False
    """The script holds gradients, or other tensors in their memory, over a backward pass."""
    reads_gradients: bool = False
    """The script itself reads gradients, within a backward pass or after it, before any function of torch does."""
    passes: int = 0
    """Backward passes that gave gradients, in the step with the fewest of them; those under `no_sync` count too."""

    parameters: str = ""
    """Checksum of the parameters that all ranks should have alike, and the device on which it was computed; "" where
    ranks may differ on purpose."""
    unreduced: tuple[str, ...] = ()
    """Checksums like `parameters`, before some steps in a row, in a script no step of which has reduced; else empty."""

    @property
    def micro_batches(self) -> float:
        """Mean number of reducing forward passes in a step."""
        return sum(self.forwards) / len(self.forwards) if self.forwards else 1.0


@dataclass(frozen=True)
class FirstLook:
    """What all ranks together know about a job before its first trial: the argument of a knob's `why_not`."""

    steps: Sequence[ObservedSteps]
    """One for each rank."""
    devices: frozenset[str]
    """Names of the devices that hold the models; `cpu` for the CPU."""
    torch: str
    """The version of torch."""
    available_arguments: frozenset[str]
    """The arguments of DDP's constructor in the installed torch that are knobs."""
    arguments: Sequence[Mapping[str, Any]]
    """For each DDP object, the arguments that the script passes."""
    untouchable: str = ""
    """Why the DDP objects must not be changed; "" if they may be."""
    script_hook: bool = False
    """The script registers a communication hook of its own."""
    hook_sees_buckets: bool = False
    """The result of that hook may depend on how gradients are put together in buckets."""
    sparse: bool = False
    """A model has sparse gradients."""
    options: frozenset[str] = frozenset()
    """Options of the command line that ask for knobs."""
    threads_pinned: str = ""
    """Why the number of threads must stay as it is; "" if it may change."""
    thread_counts: Sequence[Sequence[int]] = ((),)
    """For each rank, the numbers of threads worth trying."""
    buffer_bytes: int = 0
    """Bytes of the buffers that DDP broadcasts before a forward pass; 0 if it does not."""
    why_buffers_alike: str = ""
    """Why the ranks' buffers must stay alike; "" if each rank may keep its own."""
    unbound: str = ""
    """Why a rank cannot be bound to a NUMA node; "" if all ranks can."""

    def passes(self, argument: str) -> bool:
        """Whether the script sets `argument` of DDP to a true value for any of its models."""
        return any(given.get(argument) for given in self.arguments)

    @property
    def compiled(self) -> bool:
        """Whether torch.compile is used with a model on any rank."""
        return any(one.compiled for one in self.steps)

    @property
    def parted(self) -> bool:
        """Whether the ranks' parameters differ already. Unlike devices may differ in the last bit."""
        return are_apart([[one.parameters] for one in self.steps if one.parameters])

    @property
    def why_unreduced(self) -> str:
        """Says that no step of the script reduces, and whether its ranks have parted; "" if some step does."""
        if any(count for one in self.steps for count in one.forwards) or not self.steps:
            return ""
        return OWN_MODELS if are_apart([one.unreduced for one in self.steps]) else NEVER_REDUCES

    @property
    def graph_modes(self) -> tuple[str, ...]:
        """The modes of `cuda_graphs` that are possible on all ranks."""
        modes = self.steps[0].why_no_graphs
        return tuple(mode for mode in modes if not any(one.why_no_graphs.get(mode, "?") for one in self.steps))


def are_apart(checksums: Sequence[Sequence[str]]) -> bool:
    """Whether ranks have different parameters each time that these were taken; a list for each rank.

    Each is a checksum and the device on which it was computed: unlike devices may differ in the last bit.
    """
    looks = [[one.split(" ", 1) for one in of_ranks] for of_ranks in zip(*checksums, strict=False)]
    return bool(looks) and all(
        any(bits != of_ranks[0][0] for bits, device in of_ranks if device == of_ranks[0][1]) for of_ranks in looks
    )


class JobToTune(Protocol):
    """The facts that decide which values are worth trying. `wire.JobFacts` has them all and documents each."""

    @property
    def gradient_bytes(self) -> int: ...
    @property
    def ddp_arguments(self) -> Mapping[str, str]: ...
    @property
    def knobs(self) -> Sequence[str]: ...
    @property
    def micro_batches(self) -> float: ...
    @property
    def matrix_shapes(self) -> int: ...
    @property
    def cuda_graphs(self) -> Sequence[str]: ...
    @property
    def thread_counts(self) -> Sequence[int]: ...
