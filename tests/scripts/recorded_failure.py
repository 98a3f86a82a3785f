"""Raises on rank 1 under torch's `record`, which hands the traceback to the launcher."""

from reporter import RANK, report, wait_until_alone
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    report()
    if RANK == 1:
        wait_until_alone()
        raise RuntimeError("planted: rank 1 cannot go on")


if __name__ == "__main__":
    main()
