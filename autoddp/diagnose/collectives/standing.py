"""Says where each rank stands when none of them has called anything for a while: mostly they wait for each other.

    where_ranks_stand(recording)    # "rank 0 stands in barrier (train.py:9), rank 1 came back from all_reduce (…)"

A rank stands in its last call if that has no end. Of a call that it only started nobody knows. Ranks without a call may
be on other hosts.
"""

from __future__ import annotations

from autoddp.diagnose.collectives.recording import Recording
from autoddp.units import ranks_text

SILENCE = 10.0  # seconds without a call, from which it is told where the ranks stand


def where_ranks_stand(recording: Recording) -> str:
    """Each rank's last call, and whether it has come back from it."""
    ranks: dict[str, list[int]] = {}
    for rank, process in sorted(recording.of_rank.items()):
        last = next((call for call in reversed(process.calls) if call.place.group is not None), None)
        if last is not None:
            call = f"{last.place.collective} ({last.place.where})"
            # Of a line that only starts its calls a rank comes back at once: it may stand anywhere behind it.
            starts = any(one.place == last.place and not one.is_blocking for one in process.calls if one is not last)
            does = "came back from" if last.wait_ended else "has started" if starts else "stands in"
            ranks.setdefault(f"{does} {call}", []).append(rank)
    stand = [f"{ranks_text(of_it)} {does}" for does, of_it in ranks.items()]
    silent = [rank for rank in range(recording.world) if not any(rank in of_it for of_it in ranks.values())]
    if stand and silent:
        # One that never comes to its first call is the one for which the others wait.
        has, runs = ("has", "runs") if len(silent) == 1 else ("have", "run")
        stand.append(f"{ranks_text(silent)} {has} called nothing, or {runs} on another host")
    return ", ".join(stand)
