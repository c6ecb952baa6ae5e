"""Hypothesis strategies for small random networks.

A network is plain data (``NetSpec``), printed by a failing test and built again with ``build(NetSpec(...))``.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

Pair = namedtuple("Pair", ["main", "side"])
VOCABULARY = 11
STYLES = ("pre", "post", "sandwich", "scaled", "alpha", "skip_scaled", "averaged", "none", "inplace", "layer_scale")
NORMS = ("layer", "rms", "batch", "group", "none")
OUTPUTS = ("tensor", "tuple", "dict", "named", "states", "nested", "twice", "last_state")


@dataclass(frozen=True)
class Step:
    """One residual: how it is added, its norm, and one branch or several parallel ones."""

    style: str = "pre"
    norm: str = "layer"
    branches: tuple[str, ...] = ("mlp",)


@dataclass(frozen=True)
class NetSpec:
    """A network.

    Attributes:
        kind: ``tokens`` (ids), ``rows`` (``[B, S, C]``) or ``image`` (``[B, C, H, W]``).
        blocks: steps of each block; ``order`` says which block runs when, so that one can run twice.
        early: place after which the stream is kept for ``join`` (``add``, ``concat`` or nothing) before the last block.
        second: another input: ``added`` (a bias for each feature), ``mask`` or ``context`` (read through a weight).
        narrow: width of the stream after the middle (a new stage), or 0.
    """

    kind: str = "rows"
    width: int = 8
    blocks: tuple[tuple[Step, ...], ...] = ((Step(),),)
    order: tuple[int, ...] = (0,)
    output: str = "tensor"
    join: str = ""
    early: int = 0
    second: str = ""
    tied: bool = False
    final_norm: bool = True
    narrow: int = 0
    inplace_start: bool = False
    named: bool = True
    seed: int = 0


class Rms(nn.Module):
    """RMS norm as modelling code writes it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Swapped(nn.Module):
    """A norm with features and dimension 1 exchanged."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(1, -1)).transpose(1, -1)


def norm(kind: str, width: int, image: bool) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    if kind in ("layer", "rms"):
        made = nn.LayerNorm(width) if kind == "layer" else Rms(width)
        return Swapped(made) if image else made
    groups = next(g for g in (3, 2, 1) if width % g == 0)
    made = nn.GroupNorm(groups, width) if kind == "group" else (nn.BatchNorm2d if image else nn.BatchNorm1d)(width)
    return made if image else Swapped(made)


class Branch(nn.Module):
    """mlp, gated, attn, conv or linear over rows or images."""

    def __init__(self, kind: str, width: int, image: bool):
        super().__init__()
        self.kind, self.image = kind, image
        heads = 2 if width % 2 == 0 else 1
        self.heads, inner = heads, width + 3

        def dense(a: int, b: int, **options: Any) -> nn.Module:
            return nn.Conv2d(a, b, 1, **options) if image else nn.Linear(a, b, **options)

        if kind == "attn":
            self.qkv, self.out = dense(width, 3 * width), dense(width, width, bias=False)
        elif kind == "conv":
            conv = nn.Conv2d if image else nn.Conv1d
            self.first, self.last = conv(width, inner, 3, padding=1), conv(inner, width, 3, padding=1)
        elif kind == "gated":
            self.gate, self.up, self.down = dense(width, inner), dense(width, inner), dense(inner, width)
        elif kind == "linear":
            self.only = dense(width, width)
        else:
            self.up, self.down = dense(width, inner), dense(inner, width)
            self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "attn":
            flat = self.qkv(x).flatten(2).transpose(1, 2) if self.image else self.qkv(x)
            q, k, v = flat.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=not self.image).transpose(1, 2).flatten(2)
            return self.out(mixed.transpose(1, 2).reshape(x.shape) if self.image else mixed)
        if self.kind == "conv":
            y = x if self.image else x.transpose(1, 2)
            y = self.last(F.relu(self.first(y)))
            return y if self.image else y.transpose(1, 2)
        if self.kind == "gated":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.kind == "linear":
            return torch.tanh(self.only(x))
        return self.drop(self.down(F.gelu(self.up(x))))


class Residual(nn.Module):
    """One step."""

    def __init__(self, step: Step, width: int, image: bool):
        super().__init__()
        self.style = step.style
        self.norms = nn.ModuleList(norm(step.norm, width, image) for _ in step.branches)
        self.branches = nn.ModuleList(Branch(b, width, image) for b in step.branches)
        if step.style in ("sandwich", "post"):
            self.after = norm(step.norm, width, image)
        if step.style == "layer_scale":
            self.gamma = nn.Parameter(torch.full((width, 1, 1) if image else (width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        post = self.style == "post"
        y = None
        for pre, branch in zip(self.norms, self.branches, strict=True):
            value = branch(x if post else pre(x))
            y = value if y is None else y + value
        if self.style == "none":
            return y
        if self.style == "inplace":
            x = x.clone()
            x += y
            return F.relu_(x) if len(self.branches) == 1 else x
        if self.style == "alpha":
            return torch.add(x, y, alpha=0.5)
        if self.style == "layer_scale":
            y = self.gamma * y
        y = 0.3 * y if self.style == "scaled" else self.after(y) if self.style == "sandwich" else y
        x = 1.5 * x if self.style == "skip_scaled" else x
        added = (x + y) / 2 if self.style == "averaged" else x + y
        return self.after(added) if post else added


class Net(nn.Module):
    """Runs what a :class:`NetSpec` says."""

    def __init__(self, spec: NetSpec):
        super().__init__()
        self.spec, image, width = spec, spec.kind == "image", spec.width
        if spec.kind == "tokens":
            self.embed = nn.Embedding(VOCABULARY, width)
        elif image:
            self.embed = nn.Conv2d(3, width, 3, padding=1)
        self.half = len(spec.order) // 2 if spec.narrow else len(spec.order)
        widths = [spec.narrow if spec.order.index(i) >= self.half else width for i in range(len(spec.blocks))]
        made = [nn.Sequential(*(Residual(s, w, image) for s in b)) for b, w in zip(spec.blocks, widths, strict=True)]
        if spec.named:
            self.layers = nn.ModuleList(made)
        else:
            for number, block in enumerate(made):
                setattr(self, f"part{'abcd'[number]}", block)
        self.made = [lambda x, b=b: b(x) for b in made]
        last = spec.narrow or width
        if spec.narrow:
            self.shrink = nn.Conv2d(width, last, 3, 2, 1) if image else nn.Linear(width, last)
        if spec.join == "concat":
            self.fuse = nn.Conv2d(2 * last, last, 1) if image else nn.Linear(2 * last, last)
        if spec.second == "context":
            self.context = nn.Linear(5, width)
        self.norm = norm("layer" if spec.final_norm else "none", last, image)
        self.head = nn.Linear(last, VOCABULARY, bias=False)
        if spec.tied:
            self.head.weight = self.embed.weight

    def start(self, x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        spec = self.spec
        x = self.embed(x) if hasattr(self, "embed") else x
        shape = (1, -1, 1, 1) if spec.kind == "image" else (1, 1, -1)
        if spec.second == "added":
            x = x + other.reshape(shape)
        elif spec.second == "mask":
            x = x * other.reshape((x.shape[0],) + (1,) * (x.dim() - 1)).to(x.dtype)
        elif spec.second == "context":
            c = self.context(other)
            x = x + (c[:, :, None, None] if spec.kind == "image" else c[:, None])
        return (x.clone() if spec.kind == "rows" else x).mul_(1.25) if spec.inplace_start else x

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        spec = self.spec
        x, states, kept = self.start(x, other), [], None
        for place, index in enumerate(spec.order):
            if spec.narrow and place == self.half:
                x, kept = self.shrink(x), None
            if place == len(spec.order) - 1 and kept is not None:
                x = x + kept if spec.join == "add" else self.fuse(torch.cat([x, kept], 1 if x.dim() == 4 else -1))
            x = self.made[index](x)
            states.append(x)
            if spec.join and place == spec.early:
                kept = x
        y = self.norm(x)
        logits = self.head(y.mean((2, 3)) if spec.kind == "image" else y)
        return self.wrapped(logits, y, states)

    def wrapped(self, logits: torch.Tensor, y: torch.Tensor, states: list[torch.Tensor]) -> Any:
        return {
            "tensor": logits,
            "tuple": (logits, y.mean(-1)),
            "dict": {"logits": logits, "extra": y * 2},
            "named": Pair(logits, y),
            "states": {"logits": logits, "hidden_states": tuple(states)},
            "nested": {"first": [logits, None, 3], "rest": {"sum": logits.sum(), "y": y}},
            "twice": (logits, logits),
            "last_state": (logits, states[-1]),
        }[self.spec.output]


def example(spec: NetSpec, batch: int, length: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Arguments of one shape."""
    generator = torch.Generator().manual_seed(seed)
    if spec.kind == "tokens":
        first = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    else:
        shape = (batch, 3, length, length) if spec.kind == "image" else (batch, length, spec.width)
        first = torch.randn(shape, generator=generator)
    seconds = {
        "added": lambda: (torch.randn(spec.width, generator=generator),),
        "mask": lambda: (torch.arange(batch) % 2 == 0,),
        "context": lambda: (torch.randn(batch, 5, generator=generator),),
    }
    return (first, *seconds.get(spec.second, tuple)())


def build(spec: NetSpec) -> tuple[nn.Module, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Model, arguments to trace with, and arguments of another shape."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = Net(spec)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.running_mean.normal_(0, 0.1), module.running_var.uniform_(0.5, 1.5)
    return model.eval(), example(spec, 2, 6, 1), example(spec, 3, 8 if spec.kind == "image" else 5, 2)


STEPS = st.builds(
    Step,
    st.sampled_from(STYLES),
    st.sampled_from(NORMS),
    st.lists(st.sampled_from(("mlp", "attn", "gated", "conv", "linear")), min_size=1, max_size=2).map(tuple),
)


@st.composite
def nets(draw: st.DrawFn) -> NetSpec:
    """Any network; most have equal blocks, as most models do."""
    kind, count = draw(st.sampled_from(("tokens", "rows", "rows", "image"))), draw(st.sampled_from((4, 3, 2, 1)))
    block = st.lists(STEPS, min_size=1, max_size=2).map(tuple)
    blocks = (draw(block),) * count if draw(st.integers(0, 2)) else tuple(draw(block) for _ in range(count))
    order = tuple(range(count))
    narrow = draw(st.sampled_from((0, 0, 0, 4, 5))) if count > 1 else 0
    if not narrow and draw(st.integers(0, 3)) == 0:  # a block that runs again, at once or later
        order = tuple(sorted((*order, draw(st.sampled_from(order))))) if draw(st.booleans()) else (*order, 0)
    second = draw(st.sampled_from(("", "", "added", "mask", "context")))
    tied = kind == "tokens" and not narrow and draw(st.booleans())
    output, join = draw(st.sampled_from(OUTPUTS)), draw(st.sampled_from(("", "", "add", "concat")))
    width, early, final = draw(st.sampled_from((4, 6, 7, 8, 9))), draw(st.integers(0, 2)), draw(st.booleans())
    inplace, named, number = draw(st.integers(0, 3)) == 0, draw(st.integers(0, 2)) > 0, draw(st.integers(0, 999))
    return NetSpec(kind, width, blocks, order, output, join, early, second, tied, final, narrow, inplace, named, number)
