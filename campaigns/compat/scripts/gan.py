"""GAN: two DDP models, two optimizers, three backward passes a step."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "Both models get the same configuration; the discriminator is called three times in a step of the generator."
NOISE, BATCH = 32, 16


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 32, 4), nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 4), nn.Flatten(0),
    )  # fmt: skip


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    g, d = DDP(generator()), DDP(discriminator(), broadcast_buffers=False)
    adam_g = torch.optim.Adam(g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    adam_d = torch.optim.Adam(d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    judge, real, fake = nn.BCEWithLogitsLoss(), torch.ones(BATCH), torch.zeros(BATCH)
    torch.manual_seed(50 + rank)
    for step in range(90):
        images = torch.rand(BATCH, 1, 16, 16).round() * 2 - 1
        d.zero_grad()
        loss_real = judge(d(images), real)
        loss_real.backward()
        made = g(torch.randn(BATCH, NOISE, 1, 1))
        loss_fake = judge(d(made.detach()), fake)
        loss_fake.backward()
        adam_d.step()
        g.zero_grad()
        loss_g = judge(d(made), real)
        loss_g.backward()
        adam_g.step()
        if rank == 0 and step % 30 == 29:
            print(f"{step + 1}: D {(loss_real + loss_fake).item():.3f} G {loss_g.item():.3f}")
            torch.save(g.module.state_dict(), "netG.pth")
            torch.save(d.module.state_dict(), "netD.pth")
    leave(nn.ModuleList([g.module, d.module]))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
