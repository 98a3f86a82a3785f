"""What happens to gradients between the backward pass and the optimizer.

access            stands in front of what a script does with them
switch            leaves their reduction out
deferred          puts reductions off to the last micro-batch
accumulation      makes several steps one
kept              the gradients that wait for the last of them
optimizers        what the script's optimizers hold beside what DDP reduces
same_on_all       what ranks agree on while they keep gradients of their own
views             keeps what a bucket would write over
buffers           each rank's own buffers
comparison        a hook beside the exact mean
monitor           the same in the real job, now and then
equal_parameters  whether the ranks still have the same parameters
"""
