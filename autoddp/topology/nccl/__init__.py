"""NCCL, as it sees this machine.

log              what its log says
transports       the transports that it used, beside the predicted ones
tuner            a plugin that chooses algorithms
interface_names  which interfaces its variables name
"""
