"""What the scripts share: start, data, network, end. None of it touches DistributedDataParallel."""

import gc
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from os import sched_getaffinity  # the system's own: under a binding the script is given another answer

gc.disable()  # nothing of what an import makes is garbage, and to look for it takes a quarter of the import's time
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (the first optimizer would import it)
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

gc.freeze()  # so that Python does not look there for garbage when it ends, which takes half a second
gc.enable()

FEATURES, CLASSES, BATCH = 16, 4, 8


def start(timeout: timedelta | None = None) -> int:
    """Join the process group and seed: every rank begins with the same weights. `timeout`: None is torch's own."""
    dist.init_process_group("gloo", timeout=timeout)
    torch.manual_seed(7)
    return dist.get_rank()


def network(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def batches(steps: int, rank: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Its own generator: neither draws of the network nor of another iterator change the data.

    TIMES_LONGER multiplies the steps, TUNED_TIMES_LONGER those of a tuning job alone: a study that needs many would
    start a short script again and again.
    """
    is_tuned = os.environ.get("AUTODDP_TUNING") == "1"
    longer = int(os.environ.get("TUNED_TIMES_LONGER" if is_tuned else "TIMES_LONGER", "1"))
    source = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps * longer):
        inputs = torch.randn(BATCH, FEATURES, generator=source)
        yield inputs, inputs[:, :CLASSES].argmax(dim=1)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def finish(*modules: nn.Module) -> None:
    """Leave this rank's parameters, and the CPUs it may use, in the folder OUT, if there is one."""
    if "OUT" in os.environ:
        state = {
            f"{i}.{name}": value for i, module in enumerate(modules) for name, value in module.state_dict().items()
        }
        torch.save(state, os.path.join(os.environ["OUT"], f"rank{os.environ['RANK']}.pt"))
        with open(os.path.join(os.environ["OUT"], f"cpus{os.environ['RANK']}"), "w") as file:
            file.write(" ".join(map(str, sorted(sched_getaffinity(os.getpid())))))


def stop() -> None:
    """Leave the process group; only after main(), whose DDP objects are gone by then.

    Gloo's threads need the GIL to let go of the last collective. If one still waits for it when a reducer takes the
    process group down, or when the interpreter ends, then torch 2.13 hangs or aborts (about once in twenty times on a
    busy machine). Sleeping gives them the GIL.
    """
    time.sleep(0.1)
    dist.destroy_process_group()
