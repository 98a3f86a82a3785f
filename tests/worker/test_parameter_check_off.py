"""Where torch does not tell the check of the parameters how the ranks have met, one line says that it is off."""

import forks
from launchers import environment

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.equal_parameters import ParameterCheck
from autoddp.worker.gradients.switch import ReductionSwitch

del dist.distributed_c10d._get_process_group_store
for rank in (0, 1):
    print(f"rank {rank}", file=sys.stderr)
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    check = ParameterCheck("hook", ReductionSwitch(lambda ddp: None))
    for _ in range(2):
        ddp = DDP(torch.nn.Linear(4, 4))
        check.built(Wrapped(ddp, {}))
        sgd = torch.optim.SGD(ddp.parameters(), 0.1)
        for _ in range(20):
            check.forward_begins(ddp)
            ddp.module(torch.ones(2, 4)).sum().backward()
            sgd.step()
    dist.destroy_process_group()
"""


def test_one_line_on_rank_0():
    done = forks.run(["-c", SCRIPT], env=environment())
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(("autoddp:", "rank "))]
    assert [line[:16] for line in lines] == ["rank 0", "autoddp: warning", "rank 1"]
    assert "their parameters are not compared in this job" in lines[1]
