"""Floor 4. torchrun, as autoddp needs it for the real job and for jobs of its own.

elastic       all that autoddp asks of torch's launcher
own_torchrun  the program that starts autoddp's small jobs
"""
