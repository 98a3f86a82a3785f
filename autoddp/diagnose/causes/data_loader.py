"""Ranks wait for the batches of their loader."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autoddp.codec import replace
from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.diagnose.findings import WORTHWHILE
from autoddp.diagnose.signs import KEPT_BY_WORKERS, share
from autoddp.units import ranks_text
from autoddp.wire import Experiment

_COPIES = (
    f"{KEPT_BY_WORKERS}; and a random generator that the data set holds gives the same numbers in each worker, unless "
    "worker_init_fn seeds it"
)
_MANY_WORKERS, _MOST_WORKERS = 8, 16  # of one rank's loader: if it has few now, and at all


class DataLoader(Cause):
    in_words = "waiting for data"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        # Where a worker has the batch ready, nothing is late: what is left, to take it over, neither more workers nor
        # data that are prepared make shorter.
        data = evidence.late_data
        means = evidence.means(data)
        ranks = tuple(r for r, mean in enumerate(means) if mean >= max(WORTHWHILE * evidence.seconds, max(means) / 3))
        if not ranks:
            return
        guess = evidence.gain(lambda r, n: evidence.own[r][n] - (data[r][n] if r in ranks else 0.0))
        alone = "reading for all" if ranks == evidence.readers else "alone"
        who = "every rank waits" if len(ranks) == len(means) else f"{ranks_text(ranks)} {alone} waits"
        seen = f"{who} for the data loader: {share(max(means), evidence)}"
        # On all ranks, so that all their loaders stay at the same place: an epoch must end on all of them in one step.
        kept = Experiment(kept_batches=evidence.readers)
        # Handing batches over takes time, and loading them takes a core: no worker gives as much as kept batches.
        workers = _more_workers(evidence, max(means), around)
        # A data set that is a stream is not tried with more: unless it shares its samples among its workers, each gives
        # all of them.
        is_stream = not all(one.indexed for one in evidence.ranks)
        loaded = None
        if workers and not is_stream:
            loaded = Mend(Condition(experiment=replace(kept, loader_workers=workers)))
        mended = Mend(Condition(experiment=kept))
        fix = ""
        if workers:
            added = f"num_workers={workers}, persistent_workers=True"
            fix = f"DataLoader({added}): load batches while others are computed"
        if workers and is_stream:
            seen += "; more workers were not tried, because the data set is a stream"
            fix += (
                ", but only where each gives a part of the stream of its own (torch.utils.data.get_worker_info): else "
                "all samples come once for each worker"
            )
        if workers:
            fix += f"; {_COPIES}"
        otherwise = (
            "prepare the data once before training (decoded, cut to size, in few large files), or read it from a "
            "faster disk"
        )
        if ranks != evidence.readers:
            these = ranks_text(ranks)
            otherwise = f"let {these} read data as fast as the others do: look at the disk and at the shard there"
        yield Suspicion(
            self.name,
            ranks,
            guess,
            seen,
            mended,
            fix=fix,
            otherwise=otherwise,
            fixed=loaded,
            most="with all batches in memory",
            tried=f"{workers} workers",
        )


CAUSE = DataLoader()


def _more_workers(evidence: Evidence, waits: float, around: Surroundings) -> int:
    """How many workers keep up with a rank that waits so long for its data; 0 where none can be had."""
    present = max(one.loader_workers for one in evidence.ranks)
    most = max(2, min(_MANY_WORKERS, around.cores_per_rank), 2 * present)
    loading = max(1, present) * (evidence.seconds if present else waits)
    needed = math.ceil(loading / max(evidence.seconds - waits, 1e-9)) + 1
    workers = max(2, min(most, needed))
    return workers if present < workers <= _MOST_WORKERS else 0
