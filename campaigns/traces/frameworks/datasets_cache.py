"""datasets: a CSV file becomes a cache in the home folder, `map` another one, built by rank 0 first."""

import os

import torch.distributed as dist
from modes import EARLIER, FOLDER, SAVE_EVERY, acted, mode, report, train

MODULES = ("datasets",)


def main() -> None:
    table, marker = FOLDER / "table.csv", FOLDER / "state.txt"
    if mode() == "real":
        report(int(marker.read_text()) if marker.exists() else 0)
        return
    rank = int(os.environ["RANK"])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import load_dataset

    if rank == 0 and not table.exists():
        table.write_text("a,b\n" + "".join(f"{number},{2 * number}\n" for number in range(100)))
    first = int(marker.read_text()) if marker.exists() else 0
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank != 0:
        store.wait([f"mapped{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"])
    data = load_dataset("csv", data_files=str(table), split="train")
    offset = 1 if mode() == "earlier" else 2  # another function than yesterday: another cache
    mapped = data.map(lambda row: {"c": row["a"] + offset})
    assert mapped[3]["c"] == 3 + offset
    if rank == 0:
        store.set(f"mapped{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", "1")
        mapped.save_to_disk(str(FOLDER / f"mapped{offset}"))

    def save(step: int, *_: object) -> None:
        if rank == 0 and step % SAVE_EVERY == 0 and step < EARLIER + 60:
            marker.write_text(str(step))
            acted(step)

    train(first, save)


if __name__ == "__main__":
    main()
