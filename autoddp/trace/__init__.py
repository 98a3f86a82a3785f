"""Floor 3. Timelines of all ranks as one trace in Chrome's format, which Perfetto reads too; does not import torch.

trace = trace_of(timelines)
assert check(trace) == []
path.write_text(codec.encode(trace))
"""

from autoddp.trace.chrome_format import check
from autoddp.trace.events import trace_of
from autoddp.trace.order import Order, order_of

__all__ = ["Order", "check", "order_of", "trace_of"]
