"""A script to launch: trains as each of its arguments says, each in a fork, and leaves what came of it in OUT."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "scripts"))

import torch
import torch._dynamo
import torch.distributed as dist
from several import own_store
from trainings import TRAININGS, parameters, statistics


def main() -> None:
    rank = os.environ["RANK"]
    for number, name in enumerate(sys.argv[1:]):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            own_store(number)
            dist.init_process_group("gloo")
            modules = TRAININGS[name](int(rank))
            found = {"parameters": parameters(modules), "buffers": statistics(modules)}
            torch.save(found, os.path.join(os.environ["OUT"], f"{name}.{rank}.pt"))
            sys.stderr.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    main()
