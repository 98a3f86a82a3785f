"""torchmetrics: accuracy inside the step, synchronised over the group."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

MODULES = ("torchmetrics",)
EXPECTED = "tuned"
NOTE = "A metric whose forward call synchronises its state issues collectives of its own in every step."


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(2048, 32)
    data = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    metric = MulticlassAccuracy(num_classes=10, dist_sync_on_step=True)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            nn.functional.cross_entropy(outputs, targets).backward()
            optimizer.step()
            metric(outputs, targets)
        total = metric.compute()
        metric.reset()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {total:.3f}")
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, "last.pt")
    leave(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
