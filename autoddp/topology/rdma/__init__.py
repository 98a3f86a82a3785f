"""RDMA devices.

ports  their ports and addresses, whatever told them
sysfs  what the kernel tells
texts  what RDMA's tools print
"""
