"""Tuning of a script without DDP: each measurement is one start of it.

objective      tunes the script for its rate, or for a number that it prints
one_start      a start on this host, watched until all hosts have seen enough
progress       what a start has shown so far
start_journal  every start that was measured, one line each
"""
