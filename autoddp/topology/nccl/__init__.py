"""NCCL, as it sees this machine. What its log says is in `topology.nccl_log`.

transports       the transports that it used, beside the predicted ones
tuner            a plugin that chooses algorithms
interface_names  which interfaces its variables name
conf             variables that it reads from files
"""
