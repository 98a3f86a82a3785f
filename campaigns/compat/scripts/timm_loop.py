"""timm: a model of timm's, with its optimizer, schedule, averaged model and CheckpointSaver."""

import os

import timm
import torch
import torch.distributed as dist
from parameters import leave
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, CheckpointSaver, ModelEmaV3, distribute_bn, reduce_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MODULES = ("timm", "torchvision")
EXPECTED = "tuned"
NOTE = "CheckpointSaver links and deletes checkpoints; a tuning run does that to copies."


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2, num_classes=10
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    averaged = ModelEmaV3(model, decay=0.99)
    model = DistributedDataParallel(model)
    schedule = CosineLRScheduler(optimizer, t_initial=3, warmup_t=1, warmup_lr_init=1e-5)
    criterion = LabelSmoothingCrossEntropy(0.1)
    data = TensorDataset(torch.randn(1280, 3, 32, 32), torch.randint(10, (1280,)))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    saver = None
    if rank == 0:
        os.makedirs("output", exist_ok=True)
        saver = CheckpointSaver(
            model,
            optimizer,
            model_ema=averaged,
            checkpoint_dir="output",
            recovery_dir="output",
            decreasing=True,
            max_history=2,
        )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses = AverageMeter()
        model.train()
        for number, (inputs, targets) in enumerate(loader):
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            averaged.update(model.module)
            if number % 20 == 0:
                losses.update(reduce_tensor(loss.detach(), dist.get_world_size()).item(), len(inputs))
                if saver is not None:
                    saver.save_recovery(epoch, number)
        distribute_bn(model, dist.get_world_size(), reduce=True)
        if saver is not None:
            print(f"epoch {epoch}: loss {losses.avg:.4f}")
            saver.save_checkpoint(epoch, metric=losses.avg)
        schedule.step(epoch + 1)
    leave(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
