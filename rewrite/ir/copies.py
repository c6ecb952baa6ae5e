"""Copies of tensors that compute bitwise what their originals compute.

CPU kernels choose their path by the address of an operand modulo a vector: weights read from a file lie at odd places,
and a copy that ``torch`` allocates does not. The last bit of a sum can differ then, so copies keep that remainder.
"""

from __future__ import annotations

import copy

import torch

VECTOR = 64
"""Bytes to which torch aligns what it allocates."""


def phase(tensor: torch.Tensor) -> int:
    """Address of a CPU tensor modulo :data:`VECTOR`, in bytes; 0 where a copy could not have the same."""
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()
    if not plain or not tensor.numel() or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return 0
    remainder = tensor.data_ptr() % VECTOR
    return 0 if remainder % tensor.element_size() else remainder


def placed(tensor: torch.Tensor, remainder: int) -> torch.Tensor:
    """A detached copy whose address has this remainder."""
    if remainder == 0:
        return tensor.detach().clone()
    skip = remainder // tensor.element_size()
    room = torch.empty(tensor.numel() + VECTOR // tensor.element_size(), dtype=tensor.dtype)
    return room[skip : skip + tensor.numel()].view(tensor.shape).copy_(tensor.detach())


def copied(module: torch.nn.Module) -> torch.nn.Module:
    """A deep copy; contiguous CPU tensors keep their remainder, shared ones stay shared."""
    memo: dict[int, object] = {}
    for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
        if remainder := phase(tensor):
            new = placed(tensor, remainder)
            if isinstance(tensor, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = new
    return copy.deepcopy(module, memo)
