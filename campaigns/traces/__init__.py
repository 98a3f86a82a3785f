"""Ways in which training scripts write, replace, rotate and delete files. A tuning run must change nothing of them.

Written by somebody who does not know how autoddp isolates a tuning run.
"""
