"""Norms and scales around the branches of a residual stream."""

from .normformer import NormFormer
from .scale_vectors import ScaleVectors
from .siamese import Siamese

__all__ = ["NormFormer", "ScaleVectors", "Siamese"]
