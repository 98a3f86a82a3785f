"""The process in which the worker is a guest.

bootstrap     starts the worker when torch is imported
isolated      starts the isolation
heartbeat     tells the launcher where this rank is
rank_store    talks to the other ranks
clock_offset  how far this rank's clock is from that of rank 0
device        functions on the model's device
gloo_threads  waits for the threads of gloo
error_file    reports the exception that ends a rank
agent_store   lets ranks that a script starts find each other
ending        how a worker of the tuning job ends
"""
