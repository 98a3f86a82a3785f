"""Two DDPs and two optimizers: D on real and fake (two forwards, one backward), then G through D."""

import torch
from common import BATCH, CLASSES, FEATURES, batches, finish, start, stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

NOISE = CLASSES


def networks() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(nn.Linear(NOISE, 48), nn.ReLU(), nn.Linear(48, FEATURES))
    discriminator = nn.Sequential(nn.Linear(FEATURES, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return generator, discriminator


def judged(scores: torch.Tensor, real: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))


def main() -> None:
    rank = start()
    generator, discriminator = (DDP(net) for net in networks())
    adam_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
    adam_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    noise = torch.Generator().manual_seed(rank)
    for real, _ in batches(120, rank):
        fake = generator(torch.randn(BATCH, NOISE, generator=noise))
        adam_d.zero_grad()
        (judged(discriminator(real), 1.0) + judged(discriminator(fake.detach()), 0.0)).backward()
        adam_d.step()
        adam_g.zero_grad()
        judged(discriminator(fake), 1.0).backward()  # leaves gradients in D too, which nobody steps
        adam_g.step()
    finish(generator, discriminator)


if __name__ == "__main__":
    main()
    stop()
