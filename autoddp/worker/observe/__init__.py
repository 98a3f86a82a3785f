"""What is seen of a running script.

step_clock       where a step ends
stopwatch        how long steps take
first_steps      what the script's first steps show
stages           the stages of a step
timeline         when gradients were ready, and buckets reduced
loader           waiting for batches
host_device      copies to the device, and waiting for it
collectives      the script's own collectives, where all of them pass
call_recorder    notes each of them in a file
first_uses       where their results are first used
kernel_accounts  page faults, and waiting for a core
training_thread  the thread that trains
"""
