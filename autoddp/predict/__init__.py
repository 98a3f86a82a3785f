"""Floor 4. Predicts the seconds of a step: under another configuration, and on other nodes or another link. No torch.

    profile = profile_of(timelines, shapes, "gloo", nodes=2, ddp_arguments={}, computing=0.08)
    step_seconds(profile, Configuration({"bucket_cap_mb": 50}))

`plan` cuts gradients into buckets as DDP does, `network` moves them, `step` puts a step together, `elsewhere` scales a
job to another size. `calibration` adjusts the numbers to what was measured; only a study imports it, and numpy with it.
"""

from autoddp.predict.coefficients import Coefficients
from autoddp.predict.elsewhere import Elsewhere, UnknownLink, moved, what_if
from autoddp.predict.plan import Cuts, Gradient, buckets
from autoddp.predict.profile import Profile, Unpredictable, profile_of
from autoddp.predict.step import computing_key, computing_seconds, predictable, step_seconds

__all__ = [
    "Coefficients",
    "Cuts",
    "Elsewhere",
    "Gradient",
    "Profile",
    "UnknownLink",
    "Unpredictable",
    "buckets",
    "computing_key",
    "computing_seconds",
    "moved",
    "predictable",
    "profile_of",
    "step_seconds",
    "what_if",
]
