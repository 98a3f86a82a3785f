"""A process group of gloo in this process."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from autoddp.worker.process.gloo_threads import wait_for_rest


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of one rank, which ends after all that the test has made of it.

    If a thread of gloo were still busy then, this process could hang at its end; see `worker.process.gloo_threads`.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    wait_for_rest()
    dist.destroy_process_group()
