"""Azure Machine Learning."""

from __future__ import annotations

from autoddp.cluster.base import Platform, Told


class AzureML(Platform):
    """A node of an Azure Machine Learning job with one process per instance."""

    name = "Azure ML"
    names_last = True

    @property
    def detected(self) -> bool:
        return bool(self._text("AZUREML_NODE_COUNT"))

    @property
    def why(self) -> str:
        return self._seen("AZUREML_NODE_COUNT", "NODE_RANK")

    @property
    def hindrance(self) -> str:
        nodes, local = self._nodes("AZUREML_NODE_COUNT"), self._text("LOCAL_RANK")
        world = self._number("WORLD_SIZE", "--nnodes") if local else None
        assert nodes is not None, "not detected"
        if world is None or int(world.value) <= int(nodes.value):
            return ""
        return (
            f"WORLD_SIZE={world.value}, AZUREML_NODE_COUNT={nodes.value}: it has made the ranks already, each would "
            "become a launcher: set process_count_per_instance to 1, or give --nnodes 1 if each is a job of its own"
        )

    @property
    def nodes(self) -> Told | None:
        return self._nodes("AZUREML_NODE_COUNT")

    @property
    def node_rank(self) -> Told | None:
        return self._node_rank("NODE_RANK")

    @property
    def master_address(self) -> Told | None:
        told = self._text("AZ_BATCH_MASTER_NODE")
        return Told(told.value.rpartition(":")[0] or told.value, told.variable) if told else None
