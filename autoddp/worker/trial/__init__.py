"""A worker of the tuning job.

tuning           its course
runner           takes orders between steps
live_ddp         everything that a configuration changes
describe_job     what the launcher has to know of the job
experiments      what a diagnosis tries
trainer_threads  whether several threads train, whose steps cannot be tuned
"""
