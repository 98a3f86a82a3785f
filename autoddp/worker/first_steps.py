"""The real job's first steps: is the script one whose reductions may be put off?

A recipe is bound to the model, not to the loop around it, which may have changed since, or be another script's. So what
the study asked before it offered `defer_reductions` is asked here again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs.micro_batches import CHANGES_GRADIENTS, DEFER_REDUCTIONS, FINDS_UNUSED
from autoddp.worker.by_hand import ByHand
from autoddp.worker.ddp import DdpEvents, Wrapped
from autoddp.worker.gradient_access import parameters_of
from autoddp.worker.implicit_no_sync import Deferral

_READS = 20  # of gradients, by an optimizer or before it: ten steps or more


class FirstSteps(DdpEvents):
    """Tell it of each DDP object and forward pass; where the script is no such one, it ends `deferral` and warns."""

    def __init__(
        self, wrapped: Callable[[], Sequence[Wrapped]], deferral: Deferral, warn: Callable[[str], None]
    ) -> None:
        self._wrapped, self._deferral, self._warn = wrapped, deferral, warn
        self._by_hand: ByHand | None = None
        self._left = _READS
        self._built = 0

    def built(self, wrapped: Wrapped) -> None:
        """A DDP object: of several, one may step while another one's backward pass is yet to come.

        Models that the script has dropped count too, because each rank's garbage collector frees them at another time.
        """
        self._built += 1
        if self._built > 1:
            self._end("there are several DDP models")
        elif any(w.arguments.get("find_unused_parameters") for w in self._wrapped()):
            self._end(FINDS_UNUSED)

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass is about to run."""
        if self._by_hand is None and self._left and self._deferral.every > 1:
            self._by_hand = ByHand(parameters_of(self._wrapped()))
            self._deferral.reads = self._reads

    def _reads(self) -> None:
        assert self._by_hand is not None
        self._by_hand.reads()
        self._left -= 1
        if self._by_hand.found:
            if self._deferral.pending:
                raise RuntimeError(
                    f"autoddp: {CHANGES_GRADIENTS}, which the recipe's {DEFER_REDUCTIONS.name} has left unreduced: the "
                    "job stops; launch it without the recipe (--trials 0), or tune again (--trials 20)"
                )
            self._end(CHANGES_GRADIENTS)
        elif not self._left:
            self._stop()

    def _end(self, why: str) -> None:
        if self._deferral.every > 1:
            self._deferral.end()
            self._warn(f"the recipe's {DEFER_REDUCTIONS.name} is left out: {why}")
        self._stop()

    def _stop(self) -> None:
        self._left = 0
        self._deferral.reads = lambda: None
        if self._by_hand is not None:
            self._by_hand.stop()
