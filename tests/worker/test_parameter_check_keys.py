"""The check of the parameters keeps few keys in the store of the job, however long the job is."""

import forks
from launchers import environment

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.testing._internal.distributed.fake_pg
from autoddp.worker.ddp.private import store_of
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients import equal_parameters
from autoddp.worker.gradients.switch import ReductionSwitch

equal_parameters._EVERY = 1
dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
check = equal_parameters.ParameterCheck("hook", ReductionSwitch(lambda ddp: None))
ddp = DDP(torch.nn.Linear(4, 4))
check.built(Wrapped(ddp, {}))
sgd = torch.optim.SGD(ddp.parameters(), 0.1)
for _ in range(200):
    check.forward_begins(ddp)
    ddp.module(torch.ones(2, 4)).sum().backward()
    sgd.step()
print(sum(store_of(ddp).check([f"autoddp/check/0/{step}"]) for step in range(200)))
"""


def test_old_checksums_are_removed() -> None:
    done = forks.run(["-c", SCRIPT], env=environment())
    assert done.returncode == 0, done.stderr
    assert 8 <= int(done.stdout) <= 12  # of the first steps, and of the last ones
