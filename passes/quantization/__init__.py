"""Quantization: weights stored as integer codes with a scale for each group of inputs."""

from .quantize import Quantize, dequantised

__all__ = ["Quantize", "dequantised"]
