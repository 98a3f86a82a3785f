"""hydra: a folder of its own for each run, into which it changes; there relative names are written.

It is told a fixed folder here, so that a run goes on from the one before, as `hydra.run.dir=outputs/${name}` does.
"""

import os
import sys
from pathlib import Path

import hydra
import torch
from modes import EARLIER, FOLDER, SAVE_EVERY, acted, mode, report, train
from omegaconf import DictConfig

MODULES = ("hydra",)
RUN = FOLDER / "outputs" / "run"


@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> None:
    rank = int(os.environ["RANK"])
    assert Path.cwd() == RUN, f"hydra is in {Path.cwd()}"
    first = torch.load("last.pt")["step"] if os.path.exists("last.pt") else 0

    def save(step: int, ddp: torch.nn.Module, _: object) -> None:
        if rank == 0 and step % SAVE_EVERY == 0 and step < EARLIER + 60:
            if os.path.exists("last.pt"):
                os.replace("last.pt", "before.pt")
            torch.save({"step": step, "model": ddp.module.state_dict()}, "last.pt")
            with open("metrics.csv", "a") as file:
                file.write(f"{step}\n")
            assert (RUN / "last.pt").exists()
            acted(step)

    train(first, save)


def look() -> None:
    """The real job: hydra itself would write into the folder."""
    report(torch.load(RUN / "last.pt")["step"] if (RUN / "last.pt").exists() else 0)


if __name__ == "__main__":
    if mode() == "real":
        look()
    else:
        sys.argv += [f"hydra.run.dir={RUN}", "hydra.job.chdir=True", f"hydra.job.name=rank{os.environ['RANK']}"]
        main()
