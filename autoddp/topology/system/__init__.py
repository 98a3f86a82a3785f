"""The machine beside GPUs and RDMA.

machine     processors, NUMA nodes, limits, versions
interfaces  network interfaces
pci         how far PCI devices are apart
files       small files of the kernel
"""
