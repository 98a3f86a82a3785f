"""Meets in the store, owns files, prepares a data set once, reads its input, and fails in trials that turn a knob on.

Every start must find the user's own state, not what an earlier start has written; only the prepared data may be there.
"""

import atexit
import fcntl
import os
import stat
import sys
import termios
import time
import tty
from pathlib import Path

import torch.distributed as dist
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP

STATE, PREPARED = Path("state.txt"), Path("data_cache/prepared")


def meet_at_the_agents_store() -> None:
    """Before there is a process group: torchrun's environment names a store that its agent keeps."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank = os.environ["RANK"]
    store.set(f"stateful/{rank}", "here")
    store.wait([f"stateful/{other}" for other in range(int(os.environ["WORLD_SIZE"]))])


def listen_to_keys() -> None:
    """As scripts that end when somebody presses q: they put the terminal back at their end."""
    before, mode = termios.tcgetattr(0), fcntl.fcntl(0, fcntl.F_GETFL)
    print("terminal:", "as it was" if before[3] & termios.ECHO and not mode & os.O_NONBLOCK else "changed", flush=True)
    tty.setcbreak(0)
    fcntl.fcntl(0, fcntl.F_SETFL, mode | os.O_NONBLOCK)
    atexit.register(termios.tcsetattr, 0, termios.TCSANOW, before)
    atexit.register(fcntl.fcntl, 0, fcntl.F_SETFL, mode)


def main() -> None:
    meet_at_the_agents_store()
    rank = start()
    if rank == 0:
        print("state:", STATE.read_text().strip(), flush=True)
        if os.isatty(0):
            listen_to_keys()
        else:
            print("input:", len(sys.stdin.read()), flush=True)
            if os.environ.get("AUTODDP_TUNING") == "1" and stat.S_ISREG(os.fstat(0).st_mode):
                Path("/dev/stdin").write_text("changed")
        STATE.write_text("changed\n")
        if not PREPARED.exists():
            print("preparing the data", flush=True)
            PREPARED.parent.mkdir()
            PREPARED.write_text("prepared")
    dist.barrier()
    model = DDP(network())
    sgd = optimizer(model)
    for number, (inputs, targets) in enumerate(batches(60, rank)):
        if "PRINTS" in os.environ and number < 30:
            print("x" * 5_000_000, flush=True)
        if model.gradient_as_bucket_view:
            raise RuntimeError("planted: cannot train with gradient_as_bucket_view")
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
        if rank == 0 and "WRITES" in os.environ:
            number = sum(name.startswith("large") for name in os.listdir())
            if number == 25:
                time.sleep(60)  # autoddp looks every few seconds how much has been written
            with open(f"large{number}", "wb") as file:
                file.write(bytes(1 << 20))
        if rank == 0 and "CHANGES" in os.environ:
            with open(os.environ["CHANGES"], "r+b") as file:
                file.write(b"x")
        if rank == 0 and "PIPE" in os.environ:
            if number == 0:
                pipe = os.open(os.environ["PIPE"], os.O_WRONLY)
            os.write(pipe, f"step {number}\n".encode())
        if "REMOVES_ELSEWHERE" in os.environ:
            os.system("aws s3 rm s3://bucket/key --recursive")
    finish(model)


if __name__ == "__main__":
    main()
    stop()
