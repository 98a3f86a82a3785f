"""Progress bars, colours and carriage returns, as a training prints them; what is printed depends on no clock.

torchrun --nproc-per-node 1 tests/scripts/bars.py
"""

import os
import sys

import torch
import torch.distributed as dist
from tqdm import tqdm


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print("terminal", sys.stdout.isatty(), sys.stderr.isatty(), os.environ.get("NCCL_DEBUG"))
    for step in tqdm(range(20), desc="epoch 1", bar_format="{desc} {n_fmt} {bar}|", mininterval=0, miniters=1):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step == 10:
            tqdm.write("\033[31ma red line\033[0m")
    print("\rhalf a line", end="", flush=True)
    del model  # under torchrun, a model that outlives its group can hang: see destroys_its_group_first.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
