"""GPUs of NVIDIA.

nvml         what the driver tells
smi          starts nvidia-smi
smi_texts    what it prints
matrix       the matrix of `nvidia-smi topo -m`
matrix_rows  its columns and rows in a text
"""
