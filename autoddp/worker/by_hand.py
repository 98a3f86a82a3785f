"""Does the script change gradients itself, between a backward pass and the optimizer? Then it also reads them there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from autoddp.worker.ddp import after_this_backward, version_of


class ByHand:
    """Watches from its making until `stop()`; tell it by `reads()` before anything of torch's reads gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.found = False
        """Whether gradients were not what a backward pass had left."""
        self._parameters = [p for p in parameters if p.requires_grad]
        self._waits = False
        self._left: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        self._handles = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._parameters]

    def _accumulated(self, _parameter: torch.Tensor) -> None:
        if not self._waits:
            self._waits = True
            after_this_backward(self._ended)

    def _ended(self) -> None:
        self._waits = False
        self._left = [(p, p.grad, version_of(p.grad)) for p in self._parameters if p.grad is not None]

    def reads(self) -> None:
        """What changes gradients from here to the next backward pass is not by hand."""
        left, self._left = self._left, []
        for p, gradient, version in left:
            if p.grad is not None and (p.grad is not gradient or version_of(gradient) != version):
                self.found = True

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._left, self._parameters = [], [], []
