"""ignite: idist.auto_model, Engine, a Checkpoint handler, resumed."""

import os
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import RunningAverage
from parameters import leave
from torch import nn
from torch.utils.data import TensorDataset

MODULES = ("ignite",)
EXPECTED = "tuned"
NOTE = "The Checkpoint handler keeps two files and deletes older ones; a tuning run does that to copies."
EARLIER = True


def training(rank: int) -> None:
    torch.manual_seed(7)
    inputs = torch.randn(1280, 32)
    data = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))
    loader = idist.auto_dataloader(data, batch_size=16, shuffle=True)
    model = idist.auto_model(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

    def update(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        model.train()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    whole = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = Checkpoint(
        whole,
        DiskSaver("checkpoints", require_empty=False),
        n_saved=2,
        global_step_transform=lambda engine, _: engine.state.epoch,
    )
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle(engine: Engine) -> None:
        loader.sampler.set_epoch(engine.state.epoch)

    @trainer.on(Events.EPOCH_COMPLETED)
    def tell(engine: Engine) -> None:
        if rank == 0:
            print(f"epoch {engine.state.epoch}: loss {engine.state.metrics['loss']:.4f}")

    found = sorted(Path("checkpoints").glob("checkpoint_*.pt"), key=lambda path: int(path.stem.split("_")[1]))
    if found:
        Checkpoint.load_objects(whole, torch.load(found[-1]))
    idist.barrier()
    trainer.run(loader, max_epochs=2 if "COMPAT_EARLIER" in os.environ else 5)
    leave(model)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(lambda local_rank: training(idist.get_rank()))
