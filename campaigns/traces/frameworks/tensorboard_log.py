"""TensorBoard's SummaryWriter, which writes from a thread, and a checkpoint beside it."""

import os

import torch
from modes import EARLIER, FOLDER, SAVE_EVERY, acted, mode, report, train
from torch.utils.tensorboard import SummaryWriter

MODULES = ("tensorboard",)


def main() -> None:
    rank, last = int(os.environ["RANK"]), FOLDER / "last.pt"
    first = torch.load(last)["step"] if last.exists() else 0
    if mode() == "real":
        logs = list(FOLDER.glob("runs/*"))
        report(first, "" if len(logs) == (1 if first else 0) else f"there are the logs {logs}")
        return
    writer = SummaryWriter(FOLDER / "runs", flush_secs=1) if rank == 0 else None

    def save(step: int, ddp: torch.nn.Module, _: object) -> None:
        if writer and step % SAVE_EVERY == 0 and step < EARLIER + 60:
            writer.add_scalar("loss", 1.0 / step, step)
            writer.add_histogram("weight", ddp.module[0].weight, step)
            writer.flush()
            torch.save({"step": step}, last)
            acted(step)

    train(first, save)
    if writer:
        writer.close()


if __name__ == "__main__":
    main()
