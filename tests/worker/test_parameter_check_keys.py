"""The check of the parameters: how many keys it keeps in the store of the job, and ranks that differ on purpose."""

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


ON_PURPOSE = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.testing._internal.distributed.fake_pg
from autoddp.errors import JobStops
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.equal_parameters import ParameterCheck
from autoddp.worker.gradients.switch import ReductionSwitch


def train(rank, store, knobs, rate=0.1, local=0, inputs=1.0, perturbs=False, shards=False):
    dist.init_process_group("fake", rank=rank, world_size=2, store=store)
    check = ParameterCheck(knobs, ReductionSwitch(lambda ddp: None))
    torch.manual_seed(7)
    ddp = DDP(torch.nn.Linear(4, 4))
    check.built(Wrapped(ddp, {}))
    weight, bias = ddp.parameters()
    mine, others = ((weight, bias), (bias, weight))[rank] if shards else (ddp.parameters(), None)
    sgd = torch.optim.SGD([mine] if shards else mine, 0.1)
    for step in range(20):
        before = weight.detach().clone()
        with torch.no_grad():
            if perturbs and step >= 5:  # as SAM does after a warm-up
                weight.add_(rank)
        check.forward_begins(ddp)
        ddp.module(torch.full((2, 4), inputs)).sum().backward()
        with torch.no_grad():
            weight.copy_(before)
        sgd.step()
        with torch.no_grad():
            if shards:  # as if the other rank had stepped it and sent it
                others.sub_(others.grad, alpha=0.1)
        for number in range(local):
            ddp.module(torch.full((2, 4), float(rank))).sum().backward()
            sgd.step()
        sgd.param_groups[0]["lr"] = rate  # from the second step on
    dist.destroy_process_group()


for knobs, ways in (
    ("hook", [{"inputs": 2.0}, {"rate": 0.05}, {"local": 1}, {"perturbs": True}, {"shards": True}]),
    ("broadcast_buffers=false", [{"rate": 0.05}]),
):
    for way in ways:
        store = dist.HashStore()
        train(0, store, knobs, **{name: way[name] for name in ("local", "perturbs", "shards") if name in way})
        try:
            train(1, store, knobs, **way)
        except JobStops as error:
            assert "rank 1 has other parameters than rank 0 after" in str(error)
            dist.destroy_process_group()
            print("stops", end=" ")
        else:
            print("trains", end=" ")
"""


def test_ranks_that_differ_by_what_the_script_does_are_not_stopped() -> None:
    """A learning rate from each rank's own loss (under broadcast_buffers=false that is the knob's fault), local steps,
    parameters that are perturbed in a pass and put back, and an optimizer that steps a part on each rank."""
    done = forks.run(["-c", ON_PURPOSE], env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "stops trains trains trains trains stops "


def test_old_checksums_are_removed() -> None:
    done = forks.run(["-c", SCRIPT], env=environment())
    assert done.returncode == 0, done.stderr
    assert 8 <= int(done.stdout) <= 12  # of the first steps, and of the last ones
