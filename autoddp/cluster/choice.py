"""The platforms that are under a launcher, the innermost first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoddp.cluster.azure_ml import AzureML
from autoddp.cluster.base import Platform
from autoddp.cluster.hyperpod_eks import HyperPodEks
from autoddp.cluster.jobset import JobSet
from autoddp.cluster.kubeflow import Kubeflow, OlderPyTorchJob
from autoddp.cluster.model_arts import ModelArts
from autoddp.cluster.mpi import MpiLaunchers, MpiRanks
from autoddp.cluster.pai_dlc import PaiDlc
from autoddp.cluster.sagemaker import SageMaker
from autoddp.cluster.single_ranks import SingleRanks
from autoddp.cluster.skypilot import SkyPilot
from autoddp.cluster.slurm import Slurm
from autoddp.cluster.torchx import TorchX
from autoddp.cluster.unknown import Unknown
from autoddp.cluster.volcano import Volcano
from autoddp.errors import UsageError

PLATFORMS: Sequence[type[Platform]] = (
    MpiRanks,
    Kubeflow,
    TorchX,
    SkyPilot,
    SageMaker,
    AzureML,
    PaiDlc,
    ModelArts,
    Volcano,
    HyperPodEks,
    Slurm,
    JobSet,
    OlderPyTorchJob,
    MpiLaunchers,
    SingleRanks,
)
"""The innermost first: what starts the user's command, then operators, then Slurm; what tells little comes last."""


def platforms_here(variables: Mapping[str, str]) -> list[Platform]:
    """The platforms whose variables are set, the innermost first."""
    found = [platform for kind in PLATFORMS if (platform := kind(variables)).detected]
    mpirun = next((one for one in found if isinstance(one, MpiLaunchers)), None)
    if mpirun is not None:
        # Open MPI starts its daemons by a step of Slurm that lacks mpirun's own node: Slurm tells of that step.
        found = [one for one in found if not isinstance(one, Slurm) or one.step_nodes == mpirun.launchers]
    # Any other platform around mpirun knows the master, or at least its own numbers of the nodes.
    found = [one for one in found if len(found) == 1 or not isinstance(one, MpiLaunchers)]
    return found or [one for one in (Unknown(variables),) if one.detected]


def require_same_nodes(platforms: Sequence[Platform]) -> None:
    """UsageError for platforms that tell different numbers of nodes."""
    told = [(platform, nodes) for platform in platforms if (nodes := platform.nodes) is not None]
    for platform, nodes in told[1:]:
        first, of_first = told[0]
        if nodes.value != of_first.value:
            raise UsageError(
                f"{of_first.variable}={of_first.value} of {first.name}, but {nodes.variable}={nodes.value} of "
                f"{platform.name}: say by --nnodes which is right"
            )
