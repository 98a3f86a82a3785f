"""Captures in the circumstances of a real job: what a script holds, what its threads do, and what fails."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from autoddp.worker.graphs import Graphs

pytestmark = pytest.mark.gpu
WIDTH = 64


class Block(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.inner, self.drop, self.fails = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), fails

    def forward(self, x):
        if self.fails and torch.cuda.is_current_stream_capturing():
            x.sum().item()  # forbidden while a capture runs
        return x + self.drop(self.inner(x))


class Job:
    """A script that holds its last loss, feeds itself by pinned memory, and drops out."""

    def __init__(self, patch, fails=False):
        torch.manual_seed(0)
        self.graphs = Graphs(patch.alive, lambda ddp: True)
        patch.events = self.graphs
        patch.install()
        blocks = nn.ModuleList(Block(fails and number == 2) for number in range(4))
        self.ddp = DDP(nn.Sequential(nn.Sequential(*blocks)).cuda(), device_ids=[0], gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        data = TensorDataset(torch.randn(4096, WIDTH))
        self.batches = iter(DataLoader(data, batch_size=32, num_workers=2, pin_memory=True))
        self.loss = None

    def steps(self, count):
        losses = []
        for _ in range(count):
            (x,) = next(self.batches)
            x = x.cuda(non_blocking=True)
            self.loss = nn.functional.mse_loss(self.ddp(x), x)  # alive through every step boundary
            self.loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(self.loss.detach())
        return [float(loss) for loss in losses]

    def watch(self):
        self.steps(1)
        self.graphs.watch()
        for _ in range(3):
            self.steps(1)
            self.graphs.step()
        self.graphs.stop_watching()
        assert self.graphs.why_not == {"model": "", "blocks": ""}


@pytest.mark.parametrize("mode", ["model", "blocks"])
def test_it_captures_while_the_script_holds_its_loss_and_pins_memory(nccl, patch, figure, mode):
    job = Job(patch)
    job.watch()
    held = torch.cuda.memory_allocated()
    job.graphs.set_mode(mode)
    losses = job.steps(40)
    assert job.graphs.replayed == 40 * (1 if mode == "model" else 4)
    figure("MiB", f"{(torch.cuda.memory_allocated() - held) / 2**20:.1f}")
    assert losses[-1] < losses[0]


def test_a_capture_that_fails_leaves_no_trace(nccl, patch, figure):
    """Ten eager steps follow: stream, allocator and random generator are as before."""
    job = Job(patch, fails=True)
    job.watch()
    stream, reserved = torch.cuda.current_stream(), torch.cuda.memory_reserved()
    with pytest.raises(RuntimeError) as raised:
        job.graphs.set_mode("blocks")
    figure("said", str(raised.value).splitlines()[0][:80])
    del raised  # its frames hold what was captured
    gc.collect()
    assert torch.cuda.current_stream() == stream
    losses = job.steps(10)
    assert all(torch.tensor(losses).isfinite())
    assert job.graphs.replayed == 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    figure("MiB reserved before and after", f"{reserved / 2**20:.0f} and {torch.cuda.memory_reserved() / 2**20:.0f}")
    assert torch.cuda.memory_reserved() <= reserved


def test_the_modules_random_numbers_go_on_after_a_failure(nccl, patch, gpu):
    job = Job(patch, fails=True)
    job.watch()
    with pytest.raises(RuntimeError):
        job.graphs.set_mode("model")
    before = torch.cuda.get_rng_state(gpu)
    torch.rand(4, device=gpu)
    assert not torch.equal(torch.cuda.get_rng_state(gpu), before)
