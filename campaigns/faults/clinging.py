"""A training script that holds on to all that a killed launcher could leave: children, ports, shared memory, files."""

import os
import socket
import subprocess
import sys
import tempfile
from multiprocessing import shared_memory
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "scripts"))

import torch
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


def main() -> None:
    rank = start()
    held = shared_memory.SharedMemory(create=True, size=4096)
    port = socket.create_server(("127.0.0.1", 0))
    file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
    daemon = [sys.executable, "-c", "import os, time\nif not os.fork(): os.setsid(); time.sleep(600)"]
    subprocess.run(daemon, check=True)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    loader = iter(DataLoader(torch.zeros(100000, 1), num_workers=1))
    model = DDP(network())
    sgd = optimizer(model)
    for number, (inputs, targets) in enumerate(batches(60, rank)):
        if number % 10 == 0:
            next(loader)
        Path(f"checkpoint-{rank}").write_text(str(number))
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
    child.kill()
    port.close()
    file.close()
    os.unlink(file.name)
    held.close()
    held.unlink()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
