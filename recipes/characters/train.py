"""A character model on real text that every Python has: the sources of its own standard library. Plain DDP.

    torchrun --nproc-per-node 2 recipes/characters/train.py

A transformer of two layers predicts the next character. The last tenth of the text is held out; rank 0 prints the loss
on it at the end, in nats per character.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CONTEXT = 64  # characters that a prediction may look at
MODULES = ("argparse", "ast", "configparser", "dataclasses", "difflib", "inspect", "pathlib", "statistics", "textwrap")
"""Of the standard library, long and in plain Python in every version."""


def parse_args() -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps (default: 600)")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per rank and step (default: 16)")
    parser.add_argument("--width", type=int, default=96, help="of the model (default: 96)")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's peak learning rate (default: 0.003)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the batches (default: 0)")
    return parser.parse_args()


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and test text as ASCII codes; what is not ASCII is left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for name in MODULES for path in (folder / f"{name}.py", folder / name / "__init__.py")]
    text = b"".join(path.read_bytes() for path in files if path.is_file())
    codes = torch.tensor([code for code in text if code < 128], dtype=torch.int64)
    cut = len(codes) * 9 // 10
    return codes[:cut], codes[cut:]


class CharacterModel(nn.Module):
    """Embedding, two layers of causal attention, and a score for each character."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(width, 128)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """[batch, characters] → [batch, characters, 128]."""
        length = codes.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        inputs = self.characters(codes) + self.places.weight[:length]
        scores: torch.Tensor = self.scores(self.layers(inputs, mask=mask, is_causal=True))
        return scores


def loss_of(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    """Nats per character of [batch, CONTEXT + 1] codes."""
    scores = model(sequences[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), sequences[:, 1:].flatten())


@torch.no_grad()
def test_loss(network: nn.Module, text: torch.Tensor, device: torch.device) -> float:
    """Over the whole held-out text, cut into sequences."""
    network.eval()
    sequences = text.unfold(0, CONTEXT + 1, CONTEXT).to(device)
    losses = [loss_of(network, part).item() * len(part) for part in sequences.split(64)]
    return sum(losses) / len(sequences)


def train(model: DDP, text: torch.Tensor, args: argparse.Namespace, device: torch.device) -> None:
    """Sequences from random places, another draw on each rank; rank 0 prints now and then."""
    source = torch.Generator().manual_seed(1000 * args.seed + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    for step in range(args.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (args.batch_size,), generator=source)
        sequences = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).to(device)
        optimizer.zero_grad()
        loss = loss_of(model, sequences)
        loss.backward()
        optimizer.step()
        schedule.step()
        if dist.get_rank() == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Train, then test on rank 0."""
    args = parse_args()
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    torch.manual_seed(args.seed)
    training, test = load_text()
    network = CharacterModel(args.width).to(device)
    # The DDP object must not outlive the process group: torch 2.13 on gloo may then hang while freeing it.
    train(DDP(network, device_ids=[device.index] if use_cuda else None), training, args, device)
    if dist.get_rank() == 0:
        print(f"test loss {test_loss(network, test, device):.4f}", flush=True)
    dist.barrier()  # nobody takes the process group down while others still compute: torch 2.13 may abort then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
