"""Adapters: small trainable updates of weights beside frozen ones."""

from .lora import Lora

__all__ = ["Lora"]
