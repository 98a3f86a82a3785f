"""Floor 3. Timelines of all ranks as one trace in Chrome's format, which Perfetto reads too; does not import torch.

trace = trace_of(timelines)
assert check(trace) == []
write_trace(Path("trace.json"), trace)
"""

from autoddp.trace.chrome_format import check
from autoddp.trace.drawing import RankTrack, Slice, drawn
from autoddp.trace.events import trace_of
from autoddp.trace.order import Order, order_of
from autoddp.trace.writing import write_trace

__all__ = ["Order", "RankTrack", "Slice", "check", "drawn", "order_of", "trace_of", "write_trace"]
