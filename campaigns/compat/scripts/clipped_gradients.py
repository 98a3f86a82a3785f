"""Gradient clipping by norm and by value."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "Clipping sees gradients that are reduced already; it is in place, also where they are views of buckets."


class Language(nn.Module):
    """The language model of many tutorials: an LSTM whose state goes from one batch to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.next = nn.Embedding(120, 64), nn.LSTM(64, 64, 2), nn.Linear(64, 120)
        self.next.weight = nn.Parameter(torch.empty(120, 64).uniform_(-0.1, 0.1))

    def forward(self, tokens, state):
        hidden, state = self.rnn(self.words(tokens), state)
        return self.next(hidden), state


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(24)
    model = DDP(Language())
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    torch.manual_seed(240 + rank)
    text = (torch.randint(4, (12 * 100 + 1, 8)).cumsum(0) * 7) % 120
    state, norms = None, []
    for step in range(100):
        chunk = text[12 * step : 12 * step + 13]
        if state is not None:
            state = tuple(one.detach() for one in state)
        logits, state = model(chunk[:-1], state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), chunk[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.25).item())
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        if rank == 0 and step % 25 == 24:
            print(f"{step + 1} {loss.item():.4f}, norms up to {max(norms):.3f}")
            torch.save(model.module.state_dict(), "language.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
