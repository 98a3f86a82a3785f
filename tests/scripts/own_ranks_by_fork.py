"""Two gloo ranks that the script forks and that meet at a port of their own; each step reduces two tensors.

A step takes 200 ms, unless OMP_NUM_THREADS is 1: so that setting helps by construction. Appends to the file `runs`.
"""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist

STEPS = 14


def rank(number: int, port: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=number, world_size=2)
    for _ in range(STEPS):
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01 if os.environ.get("OMP_NUM_THREADS") == "1" else 0.2)
    with open("runs", "a") as file:
        file.write(f"{number} {os.environ.get('OMP_NUM_THREADS')}\n")
    dist.barrier()  # so that both have written


def main() -> None:
    # Bound, not listening, and kept: the kernel gives the port to nobody before rank 0 listens there.
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = kept.getsockname()[1]
    pids = []
    for number in range(2):
        pid = os.fork()
        if not pid:
            rank(number, port)
            os._exit(0)
        pids.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    main()
