"""Floor 4. torchrun, as autoddp needs it for the real job and for jobs of its own.

options       its options, as torch reads them
jobs          jobs that torch's launcher runs
meetings      meetings of launchers
surroundings  what is around torch's code while it runs
own_torchrun  the program that starts autoddp's small jobs
"""
