"""What a knob's declaration is asked about: the job as its first steps have shown it, and the job to be tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ObservedSteps:
    """What the script's first steps have shown on one rank."""

    is_static: bool
    """Every gradient became ready once per step, in one order."""
    forwards: tuple[int, ...]
    """Forward passes that reduce, of each step, over all DDP objects."""
    steps_by_closure: bool
    """The optimizer runs the backward pass itself."""
    clears: bool
    """The script calls `zero_grad`."""
    one_optimizer: bool
    """One optimizer steps all that DDP reduces."""
    why_no_graphs: dict[str, str]
    """Mode of `cuda_graphs` → why it cannot be, "" if it can; empty where nobody asks."""
    changes_gradients: bool = False
    """The script changes gradients itself before the optimizer steps."""
    joins: bool = False
    """The script trains inside `join()`."""
    compiled: bool = False
    """torch.compile has a model, a part of one, or what is around it."""

    @property
    def micro_batches(self) -> float:
        """Mean number of forward passes of a step that reduce."""
        return sum(self.forwards) / len(self.forwards) if self.forwards else 1.0


@dataclass(frozen=True)
class FirstLook:
    """What all ranks together know about a job before its first trial: a knob's `why_not` is asked with it."""

    steps: Sequence[ObservedSteps]
    """One for each rank."""
    devices: frozenset[str]
    """Names of the devices that the models are on; `cpu` for the CPU."""
    torch: str
    """Its version."""
    available_arguments: frozenset[str]
    """The knobs of DDP's constructor that the installed torch has."""
    arguments: Sequence[Mapping[str, Any]]
    """What the script passes to each DDP object."""
    untouchable: str = ""
    """Why the DDP objects must stay as they are; "" if they need not."""
    script_hook: bool = False
    """The script registers a communication hook of its own."""
    sparse: bool = False
    """A model has sparse gradients."""
    options: frozenset[str] = frozenset()
    """Options of the command line that ask for knobs."""
    threads_pinned: str = ""
    """Why the number of threads must stay as it is; "" if it need not."""
    thread_counts: Sequence[Sequence[int]] = ((),)
    """Of each rank, the numbers of threads worth trying."""
    unbound: str = ""
    """Why a rank cannot be bound to a NUMA node; "" if all can."""

    def passes(self, argument: str) -> bool:
        """Whether the script sets that argument of DDP, for any of its models."""
        return any(given.get(argument) for given in self.arguments)

    @property
    def compiled(self) -> bool:
        """Whether torch.compile has a model on any rank."""
        return any(one.compiled for one in self.steps)

    @property
    def graph_modes(self) -> tuple[str, ...]:
        """The modes of `cuda_graphs` that no rank has anything against."""
        modes = self.steps[0].why_no_graphs
        return tuple(mode for mode in modes if not any(one.why_no_graphs.get(mode, "?") for one in self.steps))


class JobToTune(Protocol):
    """What decides which values are worth trying. `wire.JobFacts` has it all, and says what each means."""

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
