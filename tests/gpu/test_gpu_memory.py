"""Memory that torch's allocator keeps for later, where the device has little left."""

import pytest
import torch
from launchers import environment
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.attempts.env_screening import Screening
from autoddp.bench.burst import Burst
from autoddp.knobs import AS_WRITTEN
from autoddp.torchrun.options import torchrun_parser
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.process.device import _NEARLY_FULL
from autoddp.worker.trial.experiments import Experiments
from autoddp.worker.trial.live_ddp import LiveDdp

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_a_turn_gives_spare_memory_back_only_where_the_device_is_nearly_full(nccl, gpu, patch, figure):
    """What the script's tensors hold stays; NCCL could not have what torch's allocator keeps."""
    patch.install()
    ddp = DDP(torch.nn.Linear(64, 64).to(gpu), device_ids=[0])
    live = LiveDdp(patch, ReductionSwitch(patch.of), (), Compiling(patch.alive), Experiments(patch))
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(gpu)
    if free < 2 * _NEARLY_FULL * total:
        pytest.skip(f"needs a GPU that others do not use: {free / total:.0%} of its memory is free")

    spare = torch.empty(2**28, dtype=torch.uint8, device=gpu)
    del spare
    kept = torch.cuda.memory_reserved(gpu)
    live.apply(AS_WRITTEN)
    assert torch.cuda.memory_reserved(gpu) == kept >= 2**28  # there is room: taking memory anew would cost time

    free, total = torch.cuda.mem_get_info(gpu)
    spare = torch.empty(int(free - _NEARLY_FULL / 2 * total), dtype=torch.uint8, device=gpu)
    held = torch.cuda.memory_allocated(gpu) - spare.numel()
    del spare
    before = torch.cuda.mem_get_info(gpu)[0]
    live.apply(AS_WRITTEN)
    after = torch.cuda.mem_get_info(gpu)[0]
    figure("free before and after", f"{before / total:.1%} and {after / total:.1%}")
    assert before < _NEARLY_FULL * total < after
    assert torch.cuda.memory_allocated(gpu) <= held
    assert torch.cuda.memory_reserved(gpu) < 2**28
    assert all(p.isfinite().all() for p in ddp.parameters())


@pytest.mark.timeout(200)
def test_the_short_benchmark_finds_room_beside_a_rank_that_waits(nccl, gpu, patch, figure, tmp_path):
    """Its processes need a context on the same device, and what NCCL works in."""
    patch.install()
    ddp = DDP(torch.nn.Linear(64, 64).to(gpu), device_ids=[0])
    live = LiveDdp(patch, ReductionSwitch(patch.of), (), Compiling(patch.alive), Experiments(patch))
    screening = Screening(torchrun_parser().parse_args(["train.py"]), tmp_path / "screening", environment())
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(gpu)
    if free < 2 * _NEARLY_FULL * total:
        pytest.skip(f"needs a GPU that others do not use: {free / total:.0%} of its memory is free")
    spare = torch.empty(free - 2**28, dtype=torch.uint8, device=gpu)
    del spare  # as at the end of a step
    full = screening._seconds(Burst.of_step(2**24, "nccl"), {})
    live.rest()
    rested = screening._seconds(Burst.of_step(2**24, "nccl"), {})
    figure("benchmarks beside a full device, and one whose rank rests", f"{bool(full)} and {bool(rested)}")
    assert rested
    assert all(p.isfinite().all() for p in ddp.parameters())
