"""Caches in a form that one graph can take at every length.

A decoder returns an object that holds tensors: keys and values that grow, the last keys of a window, states of fixed
size, a second cache for the encoder's keys. Some of them also hold numbers and switches that change from step to step,
which a graph would keep as they were when it was traced. Here those are replaced by what depends on tensors alone:

- layers that keep a window keep everything; the window is in the attention mask as well;
- the cache of the encoder's keys stays empty, and they are computed from the encoder in every step;
- states of fixed size are zeros before the first token.

Whether the model then gives what it gave before is checked on real calls, see ``capture.cached_calls``.
"""

from __future__ import annotations

import copy
from typing import Any

from hcx.rewrite.errors import TraceError

OWN, CROSS = "self_attention_cache", "cross_attention_cache"
"""Attributes of a cache that is a pair of caches: of the decoder's own tokens, and of the encoder's."""


def blank(cache: Any) -> Any:
    """An empty cache of the same kind, with windows and encoder keys replaced as the module says.

    Args:
        cache: what a model returned; not changed.

    Raises:
        TraceError: a layer cannot be emptied, or keeps a window in a way of its own.
    """
    new = copy.deepcopy(cache)
    if is_pair(new):
        setattr(new, OWN, blank(getattr(new, OWN)))
        return without_encoder(new)
    layers = getattr(new, "layers", None)
    if not isinstance(layers, list) or not all(hasattr(layer, "reset") for layer in layers):
        raise TraceError(
            f"the cache {type(cache).__name__} is no list of layers that can be emptied", where=type(cache).__name__
        )
    for layer in layers:
        layer.reset()
        _forget_states(layer)
        if getattr(layer, "is_sliding", False):
            _keep_everything(layer)
    return new


def is_pair(cache: Any) -> bool:
    """Whether a cache is a pair of caches: one of the decoder's own tokens, one of the encoder's."""
    return hasattr(cache, OWN) and hasattr(cache, CROSS)


def differs(cache: Any) -> bool:
    """Whether :func:`blank` replaces parts of such a cache."""
    return is_pair(cache) or any(getattr(layer, "is_sliding", False) for layer in getattr(cache, "layers", ()))


def without_encoder(cache: Any) -> Any:
    """A pair of caches whose second one is empty and will not be read; any other cache as it is."""
    if not is_pair(cache):
        return cache
    new, cross = copy.copy(cache), copy.copy(getattr(cache, CROSS))
    cross.layers = []
    if getattr(cross, "layer_class_to_replicate", None) is None:  # else it makes its layers as they are needed
        cross.layers = [_fresh(layer) for layer in getattr(cache, CROSS).layers]
    setattr(new, CROSS, cross)
    new.is_updated = {}  # layers whose encoder keys need not be computed again
    return new


def _fresh(layer: Any) -> Any:
    new = copy.copy(layer)
    new.__dict__.update(keys=None, values=None, is_initialized=False)
    if "cumulative_length" in new.__dict__:
        new.cumulative_length = 0
    return new


def _forget_states(layer: Any) -> None:
    """States of fixed size are made again at the first token: ``reset`` keeps them as zeros, at the old batch size."""
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name, None)
        if isinstance(states, dict):
            setattr(layer, name, dict.fromkeys(states))
            setattr(layer, f"is_{name}_initialized", dict.fromkeys(states, False))


def _keep_everything(layer: Any) -> None:
    """Make an empty layer that keeps a window one of the kind that keeps all keys."""
    from transformers import cache_utils as kinds

    whole = {
        kinds.DynamicSlidingWindowLayer: kinds.DynamicLayer,
        kinds.LinearAttentionAndSlidingWindowAttentionLayer: kinds.LinearAttentionAndFullAttentionLayer,
    }.get(type(layer))
    if whole is None:
        raise TraceError(
            f"the cache layer {type(layer).__name__} keeps a window in a way of its own", where=type(layer).__name__
        )
    layer.__class__ = whole
    for name in ("sliding_window", "cumulative_length", "_sliding_window_tensor"):
        layer.__dict__.pop(name, None)
