"""A script that forks a web server on a fixed port."""

import json
import os
import signal
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "The port must be free again when the job starts: what a tuned script leaves running is ended before."
PORT = 18431
PROGRESS = Path("progress.json")


class Status(BaseHTTPRequestHandler):
    """Answers with what rank 0 has written last."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PROGRESS.read_bytes())

    def log_message(self, *_: object) -> None:
        pass


def serve() -> int:
    """Fork the server; its process id. The socket is open before this returns. A port that is taken is an error."""
    HTTPServer.allow_reuse_port = False
    server = HTTPServer(("127.0.0.1", PORT), Status)
    child = os.fork()
    if child == 0:
        server.serve_forever()
    server.server_close()
    return child


def main() -> None:
    server = serve() if os.environ["RANK"] == "0" else 0
    dist.init_process_group("gloo")
    torch.manual_seed(16)
    model = DDP(nn.Sequential(nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(160 + dist.get_rank())
    for step in range(1, 161):
        inputs = torch.randn(32, 24)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.mean(1, keepdim=True))
        loss.backward()
        optimizer.step()
        if server and step % 40 == 0:
            PROGRESS.write_text(json.dumps({"step": step, "loss": loss.item()}))
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/") as answer:
                print("the server says", answer.read().decode())
    leave(model.module)
    if server:
        os.kill(server, signal.SIGTERM)
        os.waitpid(server, 0)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
