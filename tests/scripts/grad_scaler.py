"""Mixed precision with a GradScaler: the optimizer's step is called by the scaler, or skipped."""

import torch
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    rank = start()
    model = DDP(network())
    sgd = optimizer(model)
    # The first scale is far too big: the first steps are skipped, and later ones after each growth.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=20)
    skipped = 0
    for inputs, targets in batches(120, rank):
        sgd.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            error = loss(model(inputs), targets)
        scaler.scale(error).backward()
        scaler.unscale_(sgd)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(sgd)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    print(f"rank {rank} skipped {skipped} steps")
    finish(model)


if __name__ == "__main__":
    main()
    stop()
