"""AMP: autocast in bfloat16 and GradScaler."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "The scaler's own steps (unscale, skip, update) are the script's; a skipped step counts as a step."


def main() -> None:
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(
        nn.Sequential(
            nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 20)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The scale begins so high that some of the first steps overflow and are skipped, as on a GPU in float16.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=50)
    data = torch.Generator().manual_seed(10 + rank)
    skipped = 0
    for step in range(150):
        inputs = torch.randn(32, 256, generator=data)
        targets = inputs[:, :20].argmax(1)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.4f}, {skipped} skipped")
            torch.save({"model": model.module.state_dict(), "scaler": scaler.state_dict()}, "amp.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
