"""DDP objects.

objects          changes them: the only file that uses private names of DDP
handlers         several handlers of what happens to them, as one
model            what they wrap
inputs           what a forward pass is called with
unreduced        jobs in which DDP reduces in no step
used_parameters  parameters that a script does not use
"""
