"""A job of NCCL ranks without DDP, which share the first GPU: many small all-reduces in each step."""

import torch
import torch.distributed as dist
from share_gpu import share_gpu


def main() -> None:
    share_gpu()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    tensors = [torch.full((10, 10), 0.5, device="cuda") for _ in range(128)]
    weight = torch.nn.Parameter(torch.zeros(64, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    while True:
        for tensor in tensors:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
