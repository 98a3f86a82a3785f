"""EMA of the parameters, and SWA at the end."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

MODULES = ()
EXPECTED = "tuned"
NOTE = "Both averages are made from the DDP object itself, by a deep copy of it; they are compared as well."


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(23)
    net = nn.Sequential(
        nn.Linear(40, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 5)
    )
    model = DDP(net)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
    swa = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    swa_rate = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    torch.manual_seed(230 + rank)
    batches = [torch.randn(32, 40) for _ in range(40)]
    for epoch in range(4):
        for inputs in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), inputs[:, :5].argmax(1))
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
        if epoch >= 2:
            swa.update_parameters(model.module)
            swa_rate.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
            torch.save({"model": net.state_dict(), "ema": ema.module.module.state_dict()}, "averaged.pt")
    update_bn(batches, swa)
    leave(nn.ModuleDict({"model": net, "ema": ema.module.module, "swa": swa.module}))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
