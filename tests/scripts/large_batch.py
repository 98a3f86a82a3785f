"""A step a batch; --by-hand N has the loop that a user writes to make N of these steps one."""

import argparse
import contextlib

import torch
from common import batches, finish, loss, network, start, stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--by-hand", type=int, default=1)
    parser.add_argument("--steps", type=int, default=86, help="not a multiple of 4: the last two are kept in vain")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--schedule", action="store_true")
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--clears", choices=("before", "late", "after", "model", "zeros", "by hand"), default="before")
    args = parser.parse_args()
    rank = start()
    model = DDP(network())
    parameters = list(model.parameters())
    chosen = torch.optim.AdamW(parameters) if args.adam else torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, args.steps)
    scaler = torch.amp.GradScaler("cpu", enabled=args.scaler, growth_interval=3)

    def clear(when: str) -> None:
        if when != args.clears:
            return
        if when == "by hand":
            for parameter in parameters:
                parameter.grad = None
        elif when == "model":
            model.zero_grad()
        else:
            chosen.zero_grad(set_to_none=when != "zeros")

    for number, (inputs, targets) in enumerate(batches(args.steps, rank)):
        first, last = number % args.by_hand == 0, (number + 1) % args.by_hand == 0
        for when in ("before", "model", "zeros", "by hand") if first else ():
            clear(when)
        with contextlib.nullcontext() if last else model.no_sync():
            outputs = model(inputs)
            if first:
                clear("late")
            scaler.scale(loss(outputs, targets) / args.by_hand).backward()
        if last:
            if args.clip:
                scaler.unscale_(chosen)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(chosen)
            scaler.update()
            clear("after")
        if args.schedule:
            schedule.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
