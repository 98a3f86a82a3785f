"""The questions about its place that a launcher asks the platform under it, and what an answer is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from autoddp.errors import UsageError


class Told(NamedTuple):
    """One answer of a platform, and where it comes from.

    >>> Told("2", "SLURM_NNODES")
    Told(value='2', variable='SLURM_NNODES')
    """

    value: str
    variable: str
    """The variable that was read, or several with commas between them."""


class Platform:
    """What one platform tells by its variables. Each property is an answer; None: the platform does not tell.

        platform = SkyPilot(os.environ)
        if platform.detected:
            print(platform.nodes, platform.node_rank, platform.master_address)

    An answer may raise UsageError where its variable has a value that cannot be understood. No answer waits for the
    network, and none is checked against the others.
    """

    name = ""
    """The platform's name in messages."""

    names_last = False
    """Whether every node's name has an address before the job starts. A pod of Kubernetes gets its name meanwhile."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    @property
    def detected(self) -> bool:
        """Whether the variables are those of this platform, by more than a name that others use too."""
        raise NotImplementedError

    @property
    def why(self) -> str:
        """The variable by which the platform is known, with its value."""
        raise NotImplementedError

    @property
    def hindrance(self) -> str:
        """Why a launcher that was started in this way cannot take its place, and what to do; "" if it can."""
        return ""

    @property
    def nodes(self) -> Told | None:
        """The number of nodes."""
        return None

    @property
    def node_rank(self) -> Told | None:
        """The number of this node, from 0."""
        return None

    @property
    def processes_per_node(self) -> Told | None:
        """The number of ranks on this node."""
        return None

    @property
    def master_address(self) -> Told | None:
        """The name or address of node 0."""
        return None

    @property
    def master_port(self) -> Told | None:
        """A port of node 0 that is this job's."""
        return None

    @property
    def run_id(self) -> Told | None:
        """The job's name or number, the same on all nodes."""
        return None

    def _text(self, variable: str) -> Told | None:
        """The value of a variable; None if it is not set or empty."""
        value = self._variables.get(variable, "").strip()
        return Told(value, variable) if value else None

    def _file_name(self, variable: str) -> Told | None:
        """A variable's value as a run id: torch makes a folder of that name, and `slurm://torchx/17` can be none."""
        told = self._text(variable)
        return Told(re.sub(r"[^\w.-]+", "-", told.value), variable) if told else None

    def _number(self, variable: str, flag: str, least: int = 0) -> Told | None:
        """A variable's whole number; None if it is not set, UsageError with the overruling flag for other text."""
        told = self._text(variable)
        if told is None:
            return None
        # int() would also take digits of other scripts, signs and underscores.
        if not (told.value.isascii() and told.value.isdigit()) or len(told.value) > 10 or int(told.value) < least:
            raise UsageError(
                f"{variable}={told.value!r} of {self.name}: must be a whole number of {least} or more; correct it, or "
                f"overrule it by {flag}"
            )
        return Told(str(int(told.value)), variable)

    def _nodes(self, variable: str) -> Told | None:
        return self._number(variable, "--nnodes", least=1)

    def _node_rank(self, variable: str) -> Told | None:
        return self._number(variable, "--node-rank")

    def _processes(self, variable: str) -> Told | None:
        """The number of ranks, from a variable that counts GPUs; None where that is 0, because a rank needs no GPU."""
        told = self._number(variable, "--nproc-per-node")
        return None if told is None or told.value == "0" else told

    def _port(self, variable: str) -> Told | None:
        told = self._number(variable, "--master-port", least=1)
        if told is not None and int(told.value) > 65535:
            raise UsageError(f"{variable}={told.value} of {self.name}: must be a port; overrule it by --master-port")
        return told

    def _seen(self, *variables: str) -> str:
        """The variables that are set, with their values."""
        found = filter(None, map(self._text, variables))
        return ", ".join(f"{told.variable}={told.value}" for told in found)
