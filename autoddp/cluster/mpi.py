"""mpirun, of Open MPI, MPICH and Intel MPI: it starts several processes on one node, or one on each."""

from __future__ import annotations

from autoddp.cluster.base import Platform, Told

_HERE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""How many processes of a job are on this node: Open MPI's variable, and that of MPICH and Intel MPI."""
_ALL = {_HERE[0]: ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), _HERE[1]: ("PMI_SIZE", "PMI_RANK")}
"""For each of these: how many there are on all nodes, and which of them this is."""


class MpiRanks(Platform):
    """One of several processes of mpirun on this node. With one on each node, they are launchers, and this is not here.

    Under Slurm, Intel MPI starts them by a step with one task per node, so what Slurm tells looks like launchers.
    """

    name = "mpirun"

    @property
    def detected(self) -> bool:
        return self._processes_here is not None

    @property
    def why(self) -> str:
        return self._seen(*_HERE)

    @property
    def hindrance(self) -> str:
        return (
            f"{self.why}: it has made the ranks already, and each would become a launcher: start one process per "
            "node (Open MPI: mpirun --map-by ppr:1:node, others: mpirun -ppn 1), or give --nnodes 1 if each is a job "
            "in itself"
        )

    @property
    def _processes_here(self) -> Told | None:
        """How many there are on this node; None where it is one, or no number."""
        found = filter(None, map(self._text, _HERE))
        return next((told for told in found if told.value.isdecimal() and int(told.value) > 1), None)


class MpiLaunchers(Platform):
    """The process of mpirun on this node, one of several: each would train by itself. It tells no master."""

    name = "mpirun"

    @property
    def detected(self) -> bool:
        return self._names is not None

    @property
    def why(self) -> str:
        return self._seen(*self._names or ())

    @property
    def launchers(self) -> str:
        """How many processes mpirun has started, as its variable has it."""
        return self._variables[self._names[0]].strip() if self._names else ""

    @property
    def nodes(self) -> Told | None:
        return self._nodes(self._names[0]) if self._names else None

    @property
    def node_rank(self) -> Told | None:
        return self._node_rank(self._names[1]) if self._names else None

    @property
    def _names(self) -> tuple[str, str] | None:
        """The variables for all nodes and for this one; None where it is not one process on each of several nodes."""
        for here, names in _ALL.items():
            alone, everywhere = self._text(here), self._text(names[0])
            if alone and everywhere and alone.value == "1" and everywhere.value != "1":
                return names
        return None
