"""Plain torch image networks, kept small."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .base import HIDDEN, INNER


class BasicBlock(nn.Module):
    """torchvision's basic block: conv-bn-relu-conv-bn, skip (projected where the shape changes), ReLU after the add."""

    def __init__(self, width_in: int, width: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


def stage(width_in: int, width: int, depth: int, stride: int) -> nn.Sequential:
    return nn.Sequential(*(BasicBlock(width if i else width_in, width, 1 if i else stride) for i in range(depth)))


class ResNet(nn.Module):
    """torchvision's layout: stem, layer1 to layer4, global pooling, fc."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = stage(8, 8, 2, 1)
        self.layer2 = stage(8, 16, 2, 2)
        self.layer3 = stage(16, 24, 3, 2)
        self.layer4 = stage(24, 32, 2, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.token_mixer, self.channel_mixer = FeedForward(tokens, INNER), FeedForward(HIDDEN, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.token_mixer(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mixer(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer over 4x4 patches of 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, HIDDEN, 8, 8)
        self.blocks = nn.ModuleList(MixerBlock(16) for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixels).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def conv_bn(width_in: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(width_in, width, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(width),
    ]


class SqueezeExcite(nn.Module):
    """Channel gate from global pooling, 1x1 convolutions."""

    def __init__(self, width: int):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.expand(F.silu(self.reduce(pooled))))


class MBConv(nn.Module):
    """Expand, depthwise, squeeze-excite, project; skip where the shape is kept, or projected by a 1x1 convolution."""

    def __init__(self, width_in: int, width: int, stride: int, project: bool):
        super().__init__()
        inner = 2 * width_in
        self.body = nn.Sequential(
            *conv_bn(width_in, inner, 1),
            nn.SiLU(),
            *conv_bn(inner, inner, 3, stride, groups=inner),
            nn.SiLU(),
            SqueezeExcite(inner),
            *conv_bn(inner, width, 1),
        )
        same = stride == 1 and width_in == width
        self.skip = same or project
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*conv_bn(width_in, width, 1, stride)) if project else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.body(x) if self.skip else self.body(x)


class MBConvNet(nn.Module):
    """EfficientNet-like: stem, five MBConvs, head."""

    def __init__(self, project: bool = False):
        super().__init__()
        shapes = [(8, 16, 2), (16, 16, 1), (16, 16, 1), (16, 24, 2), (24, 24, 1)]
        self.stem = nn.Sequential(*conv_bn(3, 8, 3, 2), nn.SiLU())
        self.blocks = nn.Sequential(*(MBConv(*shape, project) for shape in shapes))
        self.classifier = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


class PlainCNN(nn.Module):
    """The layout of small SVHN nets: convolution stages in ``features``, then a classifier; no skips."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(self.stage(3, 8), self.stage(8, 16), self.stage(16, 32))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))

    @staticmethod
    def stage(width_in: int, width: int) -> nn.Sequential:
        first, second = conv_bn(width_in, width, 3), conv_bn(width, width, 3)
        return nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(F.adaptive_avg_pool2d(self.features(x), 1))


class DenseNet(nn.Module):
    """Each layer's output is concatenated to its input."""

    def __init__(self, depth: int = 4, growth: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, 2, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(growth * i), nn.ReLU(), nn.Conv2d(growth * i, growth, 3, padding=1))
            for i in range(1, depth + 1)
        )
        self.classifier = nn.Linear(growth * (depth + 1), 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return self.classifier(x.mean((2, 3)))
