"""TorchX, which tells the host of rank 0 alone."""

from __future__ import annotations

from autoddp.cluster.base import Platform, Told


class TorchX(Platform):
    """A replica of a TorchX job. On node 0 the variable may be absent."""

    name = "TorchX"

    @property
    def detected(self) -> bool:
        return bool(self._text("TORCHX_RANK0_HOST"))

    @property
    def why(self) -> str:
        return self._seen("TORCHX_RANK0_HOST")

    @property
    def master_address(self) -> Told | None:
        return self._text("TORCHX_RANK0_HOST")

    @property
    def run_id(self) -> Told | None:
        return self._file_name("TORCHX_JOB_ID")
