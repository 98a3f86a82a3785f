"""Raises on rank 1 under torch's `record`, which hands the traceback to the launcher."""

import os

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError("planted: rank 1 cannot go on")


if __name__ == "__main__":
    main()
