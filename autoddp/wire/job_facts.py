"""What the worker learns about the job before the first trial."""

from __future__ import annotations

from collections.abc import Sequence

from autoddp.bench import LinkModel
from autoddp.codec import Struct, field
from autoddp.knobs import Configuration


class JobFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """Facts about the job, the same on every rank; part of them goes into the recipe."""

    world_size: int
    nodes: int
    backend: str
    """`gloo` or `nccl`, as torch names it."""
    devices: tuple[str, ...]
    """Distinct device names over all ranks, sorted; `cpu` for a CPU job."""
    torch: str
    gradient_bytes: int
    """Bytes of the gradients of all DDP models in the script together, each reduced once."""
    parameters_digest: str
    """Digest of every parameter's shape and type in order: 16 hex digits for each model, with + between them."""
    ddp_arguments: dict[str, str]
    """What the script passes to DistributedDataParallel, as text: the baseline."""
    knobs: tuple[str, ...]
    """Names of the knobs that can be set in this job."""
    find_unused_parameters: bool = False
    """Whether the script has DDP look for unused parameters, in any of its models."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Knob name → why it cannot be set here (fixed by the script, absent from this torch, …)."""
    micro_batches: float = 1.0
    """Forward passes that end in a reduction, per step."""
    backward_passes: int = 0
    """Backward passes that give gradients, in the step and on the rank with the fewest of them."""
    matrix_shapes: int = 0
    """Distinct shapes among the gradients that are matrices, a convolution's kernels taken as one each."""
    links: tuple[str, ...] = ()
    """Distinct classes of link between GPUs, one for each kind of node; see `topology.Fingerprint`."""
    networks: tuple[str, ...] = ()
    """Distinct ways to other nodes; empty on one node."""
    network_gbps: float = 0.0
    """Gbit/s that the network devices of the slowest node say they carry; 0 on one node, and where one says nothing."""
    cuda: str = ""
    nccl: str = ""
    """Versions of CUDA and NCCL; "" where NCCL does not carry the gradients."""
    start_settings: tuple[Configuration, ...] = ()
    """Settings that need another start of the script and may gain here, the most promising first."""
    cuda_graphs: tuple[str, ...] = ()
    """Values of `cuda_graphs` that fit the models; empty where they are not asked for."""
    compiles: bool = False
    """Whether torch.compile has a model, so that any step may be one in which it compiles."""
    thread_counts: tuple[int, ...] = ()
    """CPU threads per rank worth trying; as written is not among them."""
    gradient_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of all gradients, in DDP's order."""
    link: LinkModel | None = None
    """What the link carries, as `autoddp bench` measured it in a world like this one; None if it did not."""
    uses_all: bool = False
    """Whether every gradient became ready in each of the first steps, on every rank."""
    buffer_bytes: int = 0
    """Bytes of the buffers that DDP broadcasts before a forward pass; 0 if it does not."""
    cores: int = 1
    """CPU cores that a rank's process may use, on the host that has the fewest for each of its ranks."""
    ranks_per_host: int = 1
    """Ranks on the host of `cores`."""
    own_ranks: bool = False
    """Whether the one rank that is launched starts the ranks that communicate; in a script without DDP."""
    ranks_per_group: int = 0
    """Ranks in the largest process group over which a model is reduced, if that is a part of the world; else 0."""
    ranks_of_nodes: tuple[int, ...] = ()
    """See `where_uneven`."""


def where_uneven(ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks of each host, ascending, where hosts have different numbers; else nothing.

    >>> where_uneven([8, 4])
    (4, 8)
    >>> where_uneven([8, 8])
    ()
    """
    return tuple(sorted(ranks)) if len(set(ranks)) > 1 else ()
