"""A worker of the real job.

applying  builds DDP objects by the recipe
fitting   whether the job is the recipe's
bypass    what a world of one need not do
"""
