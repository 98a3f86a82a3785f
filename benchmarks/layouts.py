"""Which buckets DDP really makes of jobs/mlp.py for each bucket setting of the search space; a part of shaped_link.py.

    python benchmarks/layouts.py --summary .autoddp/RUN/summary.json      # {"bucket_cap_mb=0.5": "11 10, 9 8, …", …}

Two settings with the same buckets are the same configuration, and an exhaustive grid needs to measure only one of them.
The buckets are read from DDP itself, in a world of one process, after the rebuild that follows the first step.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.codec import convert
from autoddp.knobs import Configuration, Rung
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB
from autoddp.study.space import Space
from autoddp.wire import JobFacts

sys.path.insert(0, str(common.JOBS))
from mlp import build_network


def facts_of(job: dict[str, Any]) -> JobFacts:
    """The facts back from summary.json."""
    return convert(job, JobFacts)


def bucket_part(configuration: Configuration) -> str:
    """The part of a configuration that decides the buckets."""
    names = ("bucket_cap_mb", "bucket_cap_mb_list")
    return str(Configuration({name: configuration[name] for name in names if name in configuration}))


def layout(network: nn.Module, width: int, configuration: Configuration) -> str:
    """The parameters' numbers, bucket by bucket."""
    model = DDP(network, **{name: configuration.plain()[name] for name in configuration.ddp_arguments})
    for _ in range(3):
        model(torch.ones(1, width)).sum().backward()
    return str(model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"])


def main() -> None:
    """Print the layouts as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--summary", type=Path, required=True)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=6)
    args = parser.parse_args()
    space = Space(Rung.EXACT, facts_of(json.loads(args.summary.read_text())["job"]))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    network = build_network(args.width, args.depth)
    buckets = BUCKET_CAP_MB.name  # the dimension of caps and of lists
    settings = [space.configuration({buckets: setting}) for setting in space.choices[buckets]]
    found = {bucket_part(setting): layout(network, args.width, setting) for setting in settings}
    print(json.dumps(found), flush=True)
    os._exit(0)  # see jobs/mlp.py


if __name__ == "__main__":
    main()
