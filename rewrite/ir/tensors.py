"""Tensors of a module tree by their dotted names."""

from __future__ import annotations

from typing import Any, cast

import torch


def fetch(root: torch.nn.Module, name: str) -> torch.Tensor:
    """Attribute of a module tree by fully qualified name."""
    value: Any = root
    for part in name.split("."):
        value = getattr(value, part)
    return cast("torch.Tensor", value)


def set_tensor(root: torch.nn.Module, name: str, tensor: torch.Tensor, *, persistent: bool = True) -> None:
    """Register a parameter (or a buffer) at a fully qualified name, creating plain modules on the way."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        root = cast("torch.nn.Module", root._modules[part])
    if isinstance(tensor, torch.nn.Parameter):
        root._parameters[leaf] = tensor
    else:
        root._buffers[leaf] = tensor.detach() if tensor.requires_grad else tensor  # the same object keeps its ties
        if not persistent:
            root._non_persistent_buffers_set.add(leaf)
