"""A config file and words that are exec'd into globals."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "The words after the script stay the script's own; a recipe is used with other words too if it fits."
WORDS = ("train_small.py", "--max_iters=120", "--dropout=0.1")
# config, as in a script of one file: all of it may be overridden
out_dir = "out"
n_layer = 4
n_embd = 96
dropout = 0.0
max_iters = 1000
gradient_accumulation_steps = 2
learning_rate = 1e-3
HERE = Path(__file__).resolve().parent / "exec_config_files"
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
exec((HERE / "configurator.py").read_text())
config = {k: globals()[k] for k in config_keys}

dist.init_process_group(backend="gloo")
rank = int(os.environ["RANK"])
master_process = rank == 0
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
layers = [nn.Embedding(64, n_embd), nn.Dropout(dropout)]
layers += [
    nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)) for _ in range(n_layer)
]
model = DDP(nn.Sequential(*layers, nn.Linear(n_embd, 64)))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
torch.manual_seed(1337 + rank)
for iter_num in range(max_iters):
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        tokens = torch.randint(64, (8, 33))
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), (tokens[:, :-1].flatten() * 3 + 1) % 64)
        (loss / gradient_accumulation_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process and iter_num % 40 == 39:
        print(f"iter {iter_num}: loss {loss.item():.4f}")
        state = {"model": model.module.state_dict(), "iter_num": iter_num, "config": config}
        torch.save(state, os.path.join(out_dir, "ckpt.pt"))
leave(model.module)
dist.destroy_process_group()
