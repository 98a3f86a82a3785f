"""What happens to gradients between the backward pass and the optimizer.

access            stands in front of what a script does with them
switch            leaves their reduction out
deferred          puts reductions off to the last micro-batch
accumulation      makes several steps one
views             keeps what a bucket would write over
buffers           each rank's own buffers
comparison        a hook beside the exact mean
monitor           the same in the real job, now and then
equal_parameters  whether the ranks still have the same parameters
"""
