"""One rank: launched without tuning and without DDP's reduction, which changes nothing but the time."""

from __future__ import annotations

import pytest
import torch
from launchers import AUTODDP, SCRIPTS, SEVERAL, TORCHRUN, start

ONE = ["--nproc-per-node", "1"]
PLAIN = str(SCRIPTS / "plain.py")
# One rank gets a thread for each core, and threads that spin for each other take them from other tests.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
LONGER = {"TIMES_LONGER": "2", **ONE_THREAD}
REPORT = "without DDP's reduction, of one rank, "
REDUCES = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(nn.Linear(4, 4), **ARGUMENTS)
AFTERWARDS
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(STEPS):
    sgd.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    sgd.step()
print("reduces", model.require_forward_param_sync)  # of the last forward pass
del model
dist.destroy_process_group()
"""


def test_the_same_parameters_and_what_it_gave(tmp_path):
    launches = [
        start(AUTODDP, tmp_path / "bypass", ["--trials", "2", *ONE, PLAIN], LONGER),
        start(TORCHRUN, tmp_path / "torchrun", [PLAIN], LONGER),
    ]
    assert [launch.wait().returncode for launch in launches] == [0, 0], launches[0].stderr[-2000:]
    assert "with one rank there is nothing to tune" in launches[0].stderr
    assert not list(launches[0].folder.glob(".autoddp"))
    assert [launch.stderr.count(REPORT) for launch in launches] == [1, 0]
    assert " ms" in launches[0].stderr.partition(REPORT)[2].splitlines()[0]
    states = [torch.load(launch.folder / "rank0.pt") for launch in launches]
    for name, value in states[1].items():
        assert torch.equal(value, states[0][name])


OWN_GROUP = """
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

store = dist.HashStore()
group = dist.ProcessGroup(store, 0, 1)
group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
gloo = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
model = DDP(nn.Linear(4, 4), process_group=group)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    sgd.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    sgd.step()
print("trained")
del model
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """One launch of all scripts below."""
    folder = tmp_path_factory.mktemp("together")
    variants = [
        ("", {}),
        ("", {"find_unused_parameters": True}),
        ("model.register_comm_hook(None, allreduce_hook)", {}),
        ("model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)", {}),
        ("", {"static_graph": True}),
        ("model._set_static_graph()", {}),
        ("", {"gradient_as_bucket_view": True}),  # its gradients would need memory of their own
    ]
    scripts = []
    for number, (afterwards, arguments) in enumerate(variants):
        scripts.append(folder / f"reduces{number}.py")
        steps = "120" if number < 2 else "12"  # without a reduction, until that is reported
        text = REDUCES.replace("AFTERWARDS", afterwards).replace("ARGUMENTS", repr(arguments)).replace("STEPS", steps)
        scripts[-1].write_text(text)
    scripts.append(folder / "own_group.py")
    scripts[-1].write_text(OWN_GROUP)
    launch = start(AUTODDP, folder / "out", [*ONE, SEVERAL, *map(str, scripts), "own_ranks.py"], ONE_THREAD).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch


def test_what_needs_its_reduction_keeps_it(together):
    reduces = [line for line in together.stdout.splitlines() if line.startswith("reduces")]
    assert reduces == ["reduces False"] * 2 + ["reduces True"] * 5
    own = [torch.load(together.folder / "own_ranks" / f"rank{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(own[0][name], own[1][name]) for name in own[0])
    assert together.stderr.count(REPORT) == 2


def test_a_group_that_the_script_has_made_by_its_class(together):
    """As torchft's does: none of torch's functions has made it, so torch does not know its ranks."""
    assert together.stdout.splitlines().count("trained") == 1
