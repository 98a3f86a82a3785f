"""What settings change in a running process, beside DDP.

base           the interface of an effect
threads        the number of threads
binding        the NUMA node
compiling      the settings of torch.compile
torch_compile  compilations, counted and made anew
"""
