"""Slurm, also under AWS ParallelCluster and SageMaker HyperPod."""

from __future__ import annotations

from autoddp.cluster.base import Platform, Told
from autoddp.cluster.node_list import first_name
from autoddp.errors import UsageError

_FIRST_PORT, _PORTS = 15_000, 15_000  # below the ports that the kernel gives to whoever asks for any
_STEPS_APART = 4099  # a prime: steps of one job, and jobs that follow each other, get other ports


class Slurm(Platform):
    """A process of a Slurm job. One that srun has started is in a *step*, and only a step starts a launcher per node.

    In a batch script, and in the shell of salloc, there is one launcher whatever SLURM_NNODES is. A job that is
    submitted from a step inherits the step's variables. They are known to be stale where the new job's own variables
    differ from them, because srun sets both alike.

    SLURM_LAUNCH_NODE_IPADDR is not read: it is the host of srun, which need not be a node of the job.
    """

    name = "Slurm"
    names_last = True

    @property
    def detected(self) -> bool:
        return bool(self._text("SLURM_JOB_ID") and self._text("SLURM_NNODES"))

    @property
    def why(self) -> str:
        return self._seen("SLURM_JOB_ID", "SLURM_NNODES")

    @property
    def hindrance(self) -> str:
        nodes = self._nodes("SLURM_NNODES")
        assert nodes is not None, "not detected"
        if not self._in_step():
            if nodes.value == "1":
                return ""
            return (
                f"SLURM_NNODES={nodes.value}, but srun has not started this launcher, so it is the only one: "
                "put srun in front (srun autoddp …), or give --nnodes 1 for this node alone"
            )
        tasks = self._number("SLURM_STEP_NUM_TASKS", "--nnodes", least=1)
        if tasks is None or int(tasks.value) <= int(nodes.value) or self._is_shell():
            return ""
        return (
            f"SLURM_STEP_NUM_TASKS={tasks.value} and SLURM_STEP_NUM_NODES={nodes.value}: srun has made the ranks "
            "already, and each would become a launcher: write srun --ntasks-per-node=1 (or the same in an #SBATCH "
            "line), or give --nnodes 1 if each task is a job of its own"
        )

    @property
    def step_nodes(self) -> str:
        """The number of nodes of the step, as its variable has it; "" outside of a step."""
        return self._variables["SLURM_STEP_NUM_NODES"].strip() if self._in_step() else ""

    @property
    def nodes(self) -> Told | None:
        """The nodes of the step. Outside of a step there is one launcher, so more nodes than one are not told."""
        if self._in_step():
            return self._nodes("SLURM_STEP_NUM_NODES")
        nodes = self._nodes("SLURM_NNODES")
        return nodes if nodes is not None and nodes.value == "1" else None

    @property
    def node_rank(self) -> Told | None:
        return self._node_rank("SLURM_NODEID") if self._in_step() else None

    @property
    def master_address(self) -> Told | None:
        told = self._text("SLURM_STEP_NODELIST") if self._in_step() else None
        if told is None:
            return None
        first, rank = first_name(told.value), self._text("SLURM_NODEID")
        if first is None:
            raise UsageError(
                f"{told.variable}={told.value!r}: the name of the first node cannot be read off this list, and no "
                "scontrol here expands it: name that node by --master-addr"
            )
        here = self._text("SLURMD_NODENAME")
        if here is not None and rank is not None and (here.value == first) != (rank.value == "0"):
            raise UsageError(
                f"{told.variable}={told.value} begins with {first}, but SLURM_NODEID={rank.value} on "
                f"SLURMD_NODENAME={here.value}: name the node of rank 0 by --master-addr"
            )
        return Told(first, told.variable)

    @property
    def master_port(self) -> Told | None:
        """A port that the number of the job and of its step give: two jobs on one node seldom have the same."""
        job, step = self._job("SLURM_JOB_ID"), self._job("SLURM_STEP_ID")
        if job is None or step is None:
            return None
        port = _FIRST_PORT + (int(job.value) + _STEPS_APART * int(step.value)) % _PORTS
        return Told(str(port), "SLURM_JOB_ID, SLURM_STEP_ID")

    @property
    def run_id(self) -> Told | None:
        job, step = self._job("SLURM_JOB_ID"), self._job("SLURM_STEP_ID")
        return Told(f"{job.value}.{step.value}", "SLURM_JOB_ID, SLURM_STEP_ID") if job and step else None

    def _job(self, variable: str) -> Told | None:
        return self._number(variable, "--master-port and --rdzv-id")

    def _is_shell(self) -> bool:
        """Whether this may be the shell of `srun --pty`, which task 0 alone has: other tasks have ended there."""
        rank = self._text("SLURM_PROCID")
        return bool(self._text("SLURM_PTY_PORT")) and rank is not None and rank.value == "0"

    def _in_step(self) -> bool:
        """Whether srun has started this process for its job's present step."""
        pairs = (("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
        same = all(self._variables.get(step) == self._variables.get(job) for step, job in pairs)
        return same and bool(self._text("SLURM_STEP_ID") and self._text("SLURM_STEP_NUM_NODES"))
