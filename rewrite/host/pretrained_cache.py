"""Cache objects of Transformers and the flat cache tensors of a Program, in both directions.

A layer of the object is a slot of the Program, ``past_key_values.SLOT.PART``: parts ``key`` and ``value`` grow with every
token, ``conv_states.N`` and ``recurrent_states.N`` keep their size.
"""

from __future__ import annotations

from functools import cache as once
from typing import Any

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.signature import CACHE
from hcx.rewrite.tracing.caches import OWN, is_pair


def to_flat(cache: Any) -> dict[str, torch.Tensor]:
    """Tensors by flat input name; none where the cache has not seen a token.

    Raises:
        UsageError: the cache keeps a window or records more than the last state, which a Program does not.
    """
    found: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(_own(cache).layers):
        for part, tensor in _parts(layer):
            found[f"{CACHE}.{number}.{part}"] = tensor
        if found and (getattr(layer, "is_sliding", False) or getattr(layer, "record_past", False)):
            raise UsageError(
                f"cache layer {number} is a {type(layer).__name__}, which does not hold what the program needs",
                where="cache",
                hint="start with cache=None or an empty DynamicCache and pass on what the model returns",
            )
    return found


def _parts(layer: Any):
    if getattr(layer, "is_initialized", False) and layer.keys is not None and layer.keys.numel():
        yield from (("key", layer.keys), ("value", layer.values))
    seen = getattr(layer, "has_previous_state", {})
    for name in ("conv_states", "recurrent_states"):
        for index, state in getattr(layer, name, {}).items():
            if seen.get(index) and state is not None:
                yield f"{name}.{index}", state


def from_flat(cache: Any, present: dict[str, torch.Tensor]) -> Any:
    """Put the outputs ``SLOT.PART`` of a Program into a cache object (a new one for None), in place.

    Raises:
        UsageError: the Program returns a part that no cache layer of Transformers has.
    """
    from transformers import DynamicCache

    cache = cache if cache is not None else DynamicCache()
    own, slots = _own(cache), _slots(present)
    own.layers[:] = [_layer(slots.get(number, {})) for number in range(1 + max(slots))]
    return cache


def _own(cache: Any) -> Any:
    return getattr(cache, OWN) if is_pair(cache) else cache


def _slots(present: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in present.items():
        number, part = name.split(".", 1)
        slots.setdefault(int(number), {})[part] = tensor
    return slots


def _layer(parts: dict[str, torch.Tensor]) -> Any:
    kinds = {part.split(".")[0] for part in parts}
    unknown = kinds - {"key", "value", "conv_states", "recurrent_states"}
    if unknown:
        raise UsageError(
            f"the program's cache holds `{sorted(unknown)[0]}`, which no cache layer of Transformers has",
            where="as_pretrained",
            hint="call the program itself, or trace with cache=False",
        )
    count = 1 + max((int(part.split(".")[1]) for part in parts if "." in part), default=-1)
    layer = _layer_class("key" in kinds, count > 0)(number_of_states=count)
    if "key" in kinds:
        layer.keys, layer.values = parts["key"], parts["value"]
        layer.device, layer.dtype, layer.is_initialized = layer.keys.device, layer.keys.dtype, True
    for part, tensor in parts.items():
        if "." in part:
            name, index = part.split(".")
            getattr(layer, name)[int(index)] = tensor
            getattr(layer, f"is_{name}_initialized")[int(index)] = True
            layer.has_previous_state[int(index)] = True
            layer.device, layer.dtype = tensor.device, tensor.dtype
    return layer


@once
def _layer_class(attention: bool, states: bool) -> type:
    from transformers import cache_utils as kinds

    if not states:
        return kinds.DynamicLayer if attention else kinds.DummyLayer
    base = kinds.LinearAttentionAndFullAttentionLayer if attention else kinds.LinearAttentionLayer

    class States(base):
        """States as a Program keeps them: only the last ones, so that none can be taken back."""

        is_croppable = False

    return States
