"""Accelerate's save_state with automatic names and total_limit=2, and load_state of the newest."""

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from modes import EARLIER, FOLDER, SAVE_EVERY, Samples, acted, loss, mode, network, report, steps

MODULES = ("accelerate",)


def main() -> None:
    saved = FOLDER / "checkpoints"
    numbers = sorted(int(path.name.rpartition("_")[2]) for path in saved.glob("checkpoint_*"))
    first = (numbers[-1] + 1) * SAVE_EVERY if numbers else 0
    project = ProjectConfiguration(
        project_dir=str(FOLDER),
        automatic_checkpoint_naming=True,
        total_limit=2,
        iteration=numbers[-1] + 1 if numbers else 0,
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if numbers:
        accelerator.load_state(str(saved / f"checkpoint_{numbers[-1]}"))
    if mode() == "real":
        report(first, "" if len(numbers) in (0, 2) else f"there are the checkpoints {numbers}")
        return
    step = first
    for inputs, targets in loader:
        step += 1
        optimizer.zero_grad()
        accelerator.backward(loss(model(inputs), targets))
        optimizer.step()
        if step % SAVE_EVERY == 0:
            accelerator.save_state()
            accelerator.wait_for_everyone()
            if accelerator.is_main_process and step < EARLIER + 60:
                acted(step)
        if step >= steps():
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
