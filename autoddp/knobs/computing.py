"""Knobs that make computing itself faster: CPU binding, threads, how torch.compile cuts a model, CUDA graphs."""

from __future__ import annotations

from autoddp.knobs.base import Knob, Phase, Reach, Setting, boolean, one_of, whole_number_between
from autoddp.knobs.ddp_arguments import (
    BUCKET_CAP_MB,
    FIND_UNUSED,
    GRADIENT_AS_BUCKET_VIEW,
    RECOMPILE,
    caps,
    why_no_views,
)
from autoddp.knobs.job import FirstLook, JobToTune
from autoddp.units import MIB

WHOLE_MODEL, BLOCKS = "model", "blocks"
REDUCE_OVERHEAD = "reduce-overhead"
"""For models under torch.compile: the CUDA graphs that its mode of the same name makes."""
_FIRST_PIECE_MIB = 1.0  # the size of torch.compile's first piece, which refuses any smaller cap


def thread_counts(cpus: int, ranks: int, now: int) -> tuple[int, ...]:
    """The thread counts worth trying where `ranks` ranks share `cpus` CPUs: powers of two up to a fair share, and that.

    `now`, the baseline's count, is left out. Containers on one machine share CPUs without seeing each other, so small
    counts are tried even where the share is large.

    >>> thread_counts(cpus=2, ranks=1, now=2)
    (1,)
    >>> thread_counts(cpus=24, ranks=2, now=1)
    (2, 4, 8, 12)
    """
    share = max(1, cpus // ranks)
    powers = [2**exponent for exponent in range(share.bit_length()) if 2**exponent <= share]
    return tuple(sorted({*powers, share} - {now}))


def ways_to_cut(gradient_mib: float) -> list[Setting]:
    """The ways to cut a compiled model with `gradient_mib` MiB of gradients: one piece, about four, about sixteen.

    Each of them costs a compilation.

    >>> ways_to_cut(30.0)[1]
    {'optimize_ddp': True, 'bucket_cap_mb': 8.0}

    The bucket cap changes together with the cuts: a cut within a bucket gains nothing, and a bucket that spans two
    pieces has to wait for both.
    """
    sizes = caps(gradient_mib)
    whole: list[Setting] = [{OPTIMIZE_DDP.name: False, BUCKET_CAP_MB.name: sizes[-1]}]
    pieces = [size for size in (sizes[-1] / 4, sizes[-1] / 16) if size >= _FIRST_PIECE_MIB]
    return whole + [{OPTIMIZE_DDP.name: True, BUCKET_CAP_MB.name: size} for size in pieces]


def _why_no_threads(look: FirstLook) -> str:
    """The user must not have set the number, and all ranks must have the same choice."""
    if look.devices != {"cpu"}:
        return "the models are not on the CPU"
    first, *others = look.thread_counts
    if not look.threads_pinned and not first:
        return "every rank has its share of the cores already"
    return look.threads_pinned or ("the nodes differ in cores" if any(o != first for o in others) else "")


def _why_no_graphs(look: FirstLook) -> str:
    if "cpu" in look.devices:
        return "the models are not on a GPU"
    if look.passes(FIND_UNUSED):
        return "find_unused_parameters is set, and a graph uses all"
    if GRADIENT_AS_BUCKET_VIEW.name not in look.available_arguments:
        return f"it needs {GRADIENT_AS_BUCKET_VIEW.name}"
    if why := why_no_views(look):
        return why
    reasons = (reason for one in look.steps for reason in one.why_no_graphs.values() if reason)
    return "" if look.graph_modes else next(reasons, "it was not asked for")


def _graphs(job: JobToTune) -> list[Setting]:
    return [{GRADIENT_AS_BUCKET_VIEW.name: True, CUDA_GRAPHS.name: mode} for mode in job.cuda_graphs]


NUMA_BINDING = Knob[str](
    name="numa_binding",
    says="where a rank's threads run: node keeps them on the NUMA node of its GPU, or on the rank's share of the nodes",
    does=lambda _value: "each rank's threads kept on its NUMA node",
    check=one_of("node"),
    reach=Reach.PROCESS,
    phase=Phase.FIRST,
    candidates=lambda _job: ["node"],
    why_not=lambda look: look.unbound,
)

BINDS_THREADS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Variables with which the user lets OpenMP bind its threads: then nothing else does."""

THREADS = Knob[int](
    name="threads",
    says="CPU threads of one rank for one operator: ranks of a node share its cores",
    does=lambda count: f"{count} CPU thread{'s' if count > 1 else ''} per rank",
    check=whole_number_between(1, 1024),
    reach=Reach.PROCESS,
    phase=Phase.FIRST,
    candidates=lambda job: job.thread_counts,
    why_not=_why_no_threads,
    variable="OMP_NUM_THREADS",
)

OF_CORES = (NUMA_BINDING.name, THREADS.name)
"""Names of the knobs by which a rank takes cores, or leaves them to the workers of its data loaders."""

OPTIMIZE_DDP = Knob[bool](  # torch's own name for it
    name="optimize_ddp",
    says="whether torch.compile splits the graph at bucket boundaries, to overlap all-reduce with backward",
    does=lambda splits: f"the compiled model {'' if splits else 'not '}cut where buckets end",
    check=boolean,
    reach=Reach.PROCESS,
    phase=Phase.FIRST,
    candidates=lambda job: ways_to_cut(job.gradient_bytes / MIB),
    why_not=lambda look: "" if look.compiled else "no model uses torch.compile",
    option=RECOMPILE,
)

CUDA_GRAPHS = Knob[str](
    name="cuda_graphs",
    says='replay kernels: "model" as one graph, "blocks" block by block, "reduce-overhead" what torch.compile has made',
    does=lambda what: "its blocks replayed as CUDA graphs" if what == BLOCKS else "the model replayed as a CUDA graph",
    check=one_of(WHOLE_MODEL, BLOCKS, REDUCE_OVERHEAD),
    reach=Reach.PROCESS,
    phase=Phase.FIRST,
    candidates=_graphs,
    why_not=_why_no_graphs,
    option="--cuda-graphs",
    # A graph leaves its gradients where its next replay will write: they must be copied out at once.
    needs=(GRADIENT_AS_BUCKET_VIEW.name, True),
    could_part_ranks=True,
)
