"""Smooth synthetic images and sounds: values and frequencies in the range of real ones, the same on every machine."""

from __future__ import annotations

import math

import torch


def images(batch: int, channels: int, height: int, width: int) -> torch.Tensor:
    """float64 [batch, channels, height, width]: slow waves, others in each image and channel, within ±1.5."""
    y = torch.linspace(0, 1, height, dtype=torch.float64)[:, None]
    x = torch.linspace(0, 1, width, dtype=torch.float64)
    planes = [
        torch.sin(2 * math.pi * ((1 + n % 3) * y + n / 7)) + torch.cos(2 * math.pi * (1 + n % 2) * x) / 2
        for n in range(batch * channels)
    ]
    return torch.stack(planes).reshape(batch, channels, height, width)


def log_mels(batch: int, mels: int, frames: int) -> torch.Tensor:
    """float64 [batch, mels, frames]: a voice's three moving ridges over a floor of -0.5."""
    time = torch.linspace(0, 1, frames, dtype=torch.float64)
    bins = torch.arange(mels, dtype=torch.float64)[:, None]
    voices = []
    for voice in range(batch):
        pitch = mels * (0.2 + 0.1 * torch.sin(2 * math.pi * (3 + voice) * time))
        ridges = [torch.exp(-(((bins - k * pitch) / (0.02 * mels + 1)) ** 2)) / k for k in (1, 2, 3)]
        voices.append(1.7 * torch.stack(ridges).sum(0) - 0.5)
    return torch.stack(voices)


def tones(batch: int, samples: int, rate: int = 16000) -> torch.Tensor:
    """float64 [batch, samples]: rising tones within ±1, a third apart."""
    time = torch.arange(samples, dtype=torch.float64) / rate
    return torch.stack([torch.sin(2 * math.pi * 220 * 1.25**n * time * (1 + time)) for n in range(batch)])
