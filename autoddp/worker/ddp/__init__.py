"""DDP objects.

private          all that autoddp does by names of torch that are not public
held             what objects of the script hold already, read without calling their code
arguments        of DDP's constructor
rebuild          the constructor, run again on the same object
wrapped          one object: what it is like, and how it is given another configuration
patch            the class, patched in place: tells what happens to the script's objects
handlers         of what happens to them: their interface, and several as one
backward         moments of a backward pass
model            what they wrap
inputs           what a forward pass is called with
unreduced        jobs in which DDP reduces in no step
used_parameters  parameters that a script does not use
"""
