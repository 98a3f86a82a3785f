"""Make `import torchvision` work beside a CPU build of torch, for development machines and tests only.

    import torchvision_on_cpu  # before anything imports torchvision

torchvision's wheel on PyPI links to CUDA libraries. Beside a CPU torch its compiled part does not load, and the import
stops with "operator torchvision::nms does not exist". Models, data sets and transforms need none of that part: it is
enough that the operators it would have defined have a schema. Where torchvision imports as it is, this does nothing.
"""

import torch

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

library: torch.library.Library | None = None
"""Holds the schemas: they live as long as this object does."""

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms" + _NMS)
    library.define("qnms" + _NMS)
    import torchvision  # noqa: F401
