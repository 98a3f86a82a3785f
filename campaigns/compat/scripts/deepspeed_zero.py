"""DeepSpeed (ZeRO, stage 1)."""

import deepspeed
import torch
import torch.distributed as dist
from parameters import leave
from torch import nn

MODULES = ("deepspeed",)
EARLIER = True  # that job compiles what DeepSpeed compiles at its first start, about a minute on an idle machine
EXPECTED = "as written: the script built no DistributedDataParallel model"
NOTE = "DeepSpeed's engine reduces by itself, there is no DDP object to tune: it is left alone."
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": False},
    "steps_per_print": 50,
}


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(29)
    net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine, optimizer, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=CONFIG)
    torch.manual_seed(290 + rank)
    for step in range(100):
        inputs = torch.randn(16, 32)
        loss = nn.functional.cross_entropy(engine(inputs), inputs[:, :4].argmax(1))
        engine.backward(loss)
        engine.step()
        if step % 50 == 49:
            if rank == 0:
                print(f"{step + 1} {loss.item():.4f}")
            engine.save_checkpoint("deepspeed", tag="last")
    leave(net)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
