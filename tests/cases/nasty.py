"""More models of the kinds of ``shared/cases``: own code, each with one trap. Run by ``run_cases.py --nasty``."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple], Callable[[], list]]] = {}
TRAIN: set[str] = set()


def add(name: str, example: Callable[[], tuple], alt: Callable[[], list], train: bool = False):
    """Register a model: example() -> (args, kwargs), alt() -> a list of the same."""

    def register(make: Callable[[], nn.Module]):
        MODELS[name] = (make, example, alt)
        if train:
            TRAIN.add(name)
        return make

    return register


def t(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, seed: int = 0, high: int = 20) -> torch.Tensor:
    """Token ids."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def seq(d: int = 12) -> dict[str, Callable]:
    """Examples of ``[batch, length, d]`` streams."""
    return {
        "example": lambda: ((t(2, 5, d, seed=1),), {}),
        "alt": lambda: [((t(3, 7, d, seed=2),), {}), ((t(1, 4, d, seed=3),), {})],
    }


class MLP(nn.Module):
    def __init__(self, d: int, norm: bool = True):
        super().__init__()
        self.n = nn.LayerNorm(d) if norm else nn.Identity()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.n(x))))


class Attn(nn.Module):
    """Attention written with einsum."""

    def __init__(self, d: int, h: int = 2):
        super().__init__()
        self.n, self.qkv, self.o, self.h = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d), h

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(self.n(x)).view(b, s, 3, self.h, d // self.h).unbind(2)
        w = torch.einsum("bihd,bjhd->bhij", q, k).div(math.sqrt(d // self.h)).softmax(-1)
        return self.o(torch.einsum("bhij,bjhd->bihd", w, v).reshape(b, s, d))


class Stack(nn.Module):
    """Four blocks and a head; subclasses say how a residual is written."""

    def __init__(self, d: int = 12, depth: int = 4, out: int = 5):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"a": Attn(d), "m": MLP(d)}) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, out)

    def forward(self, x):
        for layer in self.layers:
            x = self.block(layer, x)
        return self.head(self.norm(x))

    def block(self, layer, x):
        x = x + layer["a"](x)
        return x + layer["m"](x)


add("einsum-attention", **seq())(Stack)


@add("inplace-stream", **seq())
class InplaceStream(Stack):
    """The whole stream lives in one tensor: every residual is ``+=``."""

    def forward(self, x):
        x = x.clone()
        for layer in self.layers:
            x += layer["a"](x)
            x += layer["m"](x)
        return self.head(self.norm(x))


@add("inplace-second", **seq())
class InplaceSecond(Stack):
    """The first add of a block is fresh, the second is in place on it, as many vision models write it."""

    def block(self, layer, x):
        x = x + layer["a"](x)
        x += layer["m"](x)
        return x


@add("inplace-input", **seq())
class InplaceInput(Stack):
    """The model writes into its own input (the caller's tensor changes in eager too)."""

    def forward(self, x):
        x.mul_(0.5)
        return super().forward(x)


@add("inplace-view", **seq())
class InplaceView(Stack):
    """A branch is added to a slice of the stream only (prefix tokens stay)."""

    def block(self, layer, x):
        y = x + layer["a"](x)
        y[:, 1:] += layer["m"](y)[:, 1:]
        return y


@add("inplace-alias-hidden", **seq())
class InplaceAlias(Stack):
    """Hidden states are collected while the stream is updated in place: all of them are the last one."""

    def forward(self, x):
        x, seen = x * 1.0, []
        for layer in self.layers:
            x += layer["a"](x)
            x += layer["m"](x)
            seen.append(x)
        return self.head(self.norm(x)), seen


@add("flat-residual", **seq())
class FlatResidual(Stack):
    """The residual is added on a reshaped stream."""

    def block(self, layer, x):
        b, s, d = x.shape
        x = (x.reshape(b * s, d) + layer["a"](x).reshape(b * s, d)).view(b, s, d)
        return (x.transpose(1, 2) + layer["m"](x).transpose(1, 2)).transpose(1, 2)


@add("nested-residual", **seq())
class NestedResidual(Stack):
    """A residual inside a branch."""

    def block(self, layer, x):
        y = layer["a"](x)
        y = y + layer["m"](y)
        return x + y


@add("long-skip", **seq())
class LongSkip(Stack):
    """U-Net like: the stream after block i is added after block n-1-i."""

    def forward(self, x):
        early = []
        for i, layer in enumerate(self.layers):
            if i >= 2:
                x = x + early.pop()
            x = self.block(layer, x)
            if i < 2:
                early.append(x)
        return self.head(self.norm(x))


@add("concat-hidden", **seq())
class ConcatHidden(Stack):
    """Hidden states are outputs and are joined for the head."""

    def __init__(self):
        super().__init__()
        self.join = nn.Linear(48, 5)

    def forward(self, x):
        hidden = []
        for layer in self.layers:
            x = self.block(layer, x)
            hidden.append(x)
        return self.join(torch.cat(hidden, -1)), hidden


@add("embedding-reused", **seq())
class EmbeddingReused(Stack):
    """Every block also reads the model's input (value-embedding style)."""

    def forward(self, x):
        first = self.norm(x)
        for layer in self.layers:
            x = x + layer["a"](x)
            x = x + layer["m"](x) + 0.1 * first
        return self.head(self.norm(x))


@add("two-heads", **seq())
class TwoHeads(Stack):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(12, 1)

    def forward(self, x):
        for layer in self.layers:
            x = self.block(layer, x)
        x = self.norm(x)
        return {"policy": self.head(x), "value": self.value(x).squeeze(-1).mean(1)}


@add("scalar-first", **seq())
class ScalarFirst(Stack):
    """The first output is a 0-dim number, the answer comes second."""

    def forward(self, x):
        y = super().forward(x)
        return y.square().mean(), y


@add("int-first", **seq())
class IntFirst(Stack):
    """The first output is an int tensor."""

    def forward(self, x):
        y = super().forward(x)
        return y.argmax(-1), y


@add("same-twice", **seq())
class SameTwice(Stack):
    def forward(self, x):
        y = super().forward(x)
        return y, y, x, None, 3, True, "tag", 0.5


@add("input-unchanged", **seq())
class InputUnchanged(nn.Module):
    def forward(self, x):
        return x


@add("constant-output", **seq())
class ConstantOutput(nn.Module):
    """An output that depends on nothing."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(t(3))

    def forward(self, x):
        return x * 2, self.p, torch.arange(4)


@add("shape-outputs", **seq())
class ShapeOutputs(nn.Module):
    """Ints that follow the input's shape, a size tuple."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(12, 3)

    def forward(self, x):
        return self.f(x), x.shape[0], x.shape[1] * 2, tuple(x.shape)


@add("float-of-shape", **seq())
class FloatOfShape(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(12, 3)

    def forward(self, x):
        return self.f(x) / x.shape[1] ** 0.5, x.shape[1] / 2, x.shape[0] > 1


@add(
    "keyword-only",
    lambda: ((t(2, 5, 12),), {"scale": 2.0, "mode": "b"}),
    lambda: [((t(3, 4, 12, seed=4),), {"mode": "b", "scale": 2.0})],
)
class KeywordOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x, *, mode="a", scale=1.0, **rest):
        return (self.f if mode == "a" else self.g)(x) * scale


@add(
    "var-args",
    lambda: ((t(2, 5, 12), t(2, 5, 12, seed=1), t(2, 5, 12, seed=2)), {"extra": t(2, 5, 12, seed=3)}),
    lambda: [((t(3, 4, 12), t(3, 4, 12, seed=5), t(3, 4, 12, seed=6)), {"extra": t(3, 4, 12, seed=7)})],
)
class VarArgs(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(12, 12)

    def forward(self, first, *others, **named):
        for i, o in enumerate(others):
            first = first - (i + 1) * self.f(o)
        return first + sum(named.values())


@add(
    "dict-input",
    lambda: (({"b": t(2, 3, 12), "a": [t(2, 3, 12, seed=1), None]},), {}),
    lambda: [(({"a": [t(4, 2, 12, seed=2), None], "b": t(4, 2, 12, seed=3)},), {})],
)
class DictInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(12, 12)

    def forward(self, batch):
        return self.f(batch["b"]) - batch["a"][0]


@add(
    "scalar-input",
    lambda: ((t(2, 5, 12), torch.tensor(0.3)), {"power": 2}),
    lambda: [((t(3, 4, 12), torch.tensor(-1.5)), {"power": 2})],
)
class ScalarInput(nn.Module):
    """A 0-dim tensor and a Python int."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(12, 12)

    def forward(self, x, gain, power=1):
        return x + gain * self.f(x) ** power


@add("int-as-shape", lambda: ((t(2, 12), 4), {}), lambda: [((t(3, 12, seed=1), 4), {})])
class IntAsShape(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(12, 12)

    def forward(self, x, n):
        return self.f(x).unsqueeze(1).expand(-1, n, -1) + torch.arange(n)[:, None]


@add(
    "tied-lengths",
    lambda: ((t(2, 6, 12), t(2, 6, 12, seed=1)), {}),
    lambda: [((t(3, 6, 12), t(3, 9, 12, seed=1)), {}), ((t(2, 9, 12), t(2, 4, 12, seed=2)), {})],
)
class TwoLengths(nn.Module):
    """Two lengths that are equal in the example only."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x, memory):
        return x + (self.q(x) @ self.k(memory).mT).softmax(-1) @ memory


@add("batch-and-length-equal", lambda: ((t(4, 4, 12),), {}), lambda: [((t(2, 7, 12, seed=1),), {})])
class Equal(Stack):
    pass


@add("weight-norm", **seq())
class WeightNorm(Stack):
    def __init__(self):
        super().__init__()
        self.head = nn.utils.parametrizations.weight_norm(self.head)
        self.layers[0]["m"].up = nn.utils.parametrizations.spectral_norm(self.layers[0]["m"].up)


@add("old-weight-norm", **seq())
class OldWeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = torch.nn.utils.weight_norm(nn.Linear(12, 7))

    def forward(self, x):
        return self.f(x)


@add("shared-buffer", **seq())
class SharedBuffer(Stack):
    """One table registered as a buffer in every layer, one of them not persistent."""

    def __init__(self):
        super().__init__()
        table = t(12, seed=9)
        for i, layer in enumerate(self.layers):
            layer["m"].register_buffer("table", table, persistent=i != 1)

    def block(self, layer, x):
        return super().block(layer, x) + layer["m"].table


@add("shared-norm-module", **seq())
class SharedNorm(Stack):
    """One norm object used by all blocks, and one MLP used by every second block."""

    def __init__(self):
        super().__init__()
        for i, layer in enumerate(self.layers):
            layer["m"] = self.layers[i % 2]["m"]
            layer["a"].n = self.norm


@add("called-twice", **seq())
class CalledTwice(Stack):
    def forward(self, x):
        return super().forward(x) + super().forward(x.flip(1))


@add("mixed-dtypes", **seq())
class MixedDtypes(Stack):
    """bf16 matrices, fp32 norms and stream."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer["m"].up.to(torch.bfloat16)
            layer["m"].down.to(torch.bfloat16)

    def block(self, layer, x):
        x = x + layer["a"](x)
        m = layer["m"]
        return x + m.down(F.gelu(m.up(m.n(x).bfloat16()))).float()


@add("bf16-stream", **seq())
class Bf16Stream(Stack):
    """The stream itself is bf16, the head fp32."""

    def __init__(self):
        super().__init__()
        self.layers.to(torch.bfloat16)

    def forward(self, x):
        x = x.bfloat16()
        for layer in self.layers:
            x = self.block(layer, x)
        return self.head(self.norm(x.float()))


@add("float64-model", lambda: ((t(2, 5, 12).double(),), {}), lambda: [((t(3, 4, 12).double(),), {})])
class Float64(Stack):
    def __init__(self):
        super().__init__()
        self.double()


def image(*shape: int, seed: int = 0) -> tuple:
    return ((t(*shape, seed=seed),), {})


@add("batchnorm-resnet", lambda: image(2, 3, 12, 12), lambda: [image(3, 3, 8, 10, seed=1)])
class BatchNormNet(nn.Module):
    """Residual blocks with BatchNorm and in-place ReLU after the add."""

    def __init__(self, c: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(c, c, 3, padding=1),
                nn.BatchNorm2d(c),
                nn.ReLU(inplace=True),
                nn.Conv2d(c, c, 3, padding=1),
                nn.BatchNorm2d(c),
            )
            for _ in range(4)
        )
        self.fc = nn.Linear(c, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = F.relu(y, inplace=True)
        return self.fc(x.mean((2, 3)))


@add("inplace-relu-before", lambda: image(2, 3, 12, 12), lambda: [image(3, 3, 8, 10, seed=1)])
class PreActInplace(nn.Module):
    """Pre-activation with in-place ReLU on the stream itself: the skip is the rectified stream."""

    def __init__(self, c: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(4))
        self.fc = nn.Linear(c, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(F.relu_(x))
        return self.fc(x.mean((2, 3)))


@add("train-batchnorm", lambda: image(2, 3, 12, 12), lambda: [image(3, 3, 8, 10, seed=1)], train=True)
class TrainBatchNorm(BatchNormNet):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.blocks[1].eval()  # partly frozen

    def forward(self, x):
        return self.drop(super().forward(x))


@add("lstm", **seq())
class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(12, 12, num_layers=2, batch_first=True)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        y, (h, _) = self.rnn(x)
        return self.out(x + y), h


@add("complex-stack", **seq())
class ComplexStack(Stack):
    """A complex buffer rotates each branch's input; deep enough to loop."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rot", torch.polar(torch.ones(6), t(6, seed=3)))

    def block(self, layer, x):
        y = torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], 6, 2).contiguous()) * self.rot).flatten(
            -2
        )
        x = x + layer["a"](y)
        return x + layer["m"](x)


@add("complex-output", **seq())
class ComplexOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(12, 12)

    def forward(self, x):
        return torch.fft.rfft(self.f(x), dim=-1), x + self.f(x)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return -g


@add("autograd-function", **seq())
class CustomFunction(Stack):
    """Gradient reversal: forward and backward differ on purpose."""

    def forward(self, x):
        return super().forward(_Scale.apply(x))


@add("no-grad-part", **seq())
class NoGradPart(Stack):
    """A frozen first half under no_grad, autocast off in the middle."""

    def forward(self, x):
        with torch.no_grad():
            x = self.block(self.layers[0], x)
            x = self.block(self.layers[1], x)
        x = self.block(self.layers[2], x.detach())
        with torch.autocast("cpu", enabled=False):
            x = self.block(self.layers[3], x)
        return self.head(self.norm(x))


@add("no-parameters", **seq())
class NoParameters(nn.Module):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)).softmax(-1)


@add("state-between-calls", **seq())
class Counter(nn.Module):
    """Counts calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(12, 12)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.f(x) + self.calls


@add("noise", **seq())
class Noise(nn.Module):
    """Draws random numbers in eval mode; small enough to be missed."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(12, 12)

    def forward(self, x):
        return self.f(x) + 1e-7 * torch.randn_like(x)


@add("awkward-names", **seq())
class AwkwardNames(nn.Module):
    """Parameter names that collide with attributes of Program, and node names."""

    def __init__(self):
        super().__init__()
        self.graph, self.signature, self.tensor, self.m = (
            nn.Linear(12, 12),
            nn.Linear(12, 12),
            nn.Linear(12, 12),
            nn.Linear(12, 12),
        )
        self.examples = nn.Parameter(t(12, seed=1))
        self.register_buffer("training_", t(12, seed=2))
        self.register_buffer("inputs", t(12, seed=3))
        self.hcx = nn.ModuleDict({"exits_0": nn.Linear(12, 12), "a-b": nn.Linear(12, 12), "x y": nn.Linear(12, 12)})

    def forward(self, x):
        x = (
            self.graph(x)
            + self.signature(x) * self.examples
            + self.tensor(x) * self.training_
            + self.m(x) * self.inputs
        )
        return x + sum(f(x) for f in self.hcx.values())


@add(
    "input-called-self",
    lambda: ((), {"input": t(2, 5, 12), "return_dict": True, "lambda_": t(2, 5, 12, seed=1)}),
    lambda: [],
)
class AwkwardArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.input = nn.Linear(12, 12)

    def forward(self, input, lambda_, return_dict=False):
        y = self.input(input) * lambda_
        return {"input": y, "output": y + 1, "logits": y - 1} if return_dict else (y,)


@add("frozen-and-sliced", **seq())
class Sliced(Stack):
    """Parameters without gradient, one weight that is a view of another's storage, an integer buffer, an empty one."""

    def __init__(self):
        super().__init__()
        base = t(24, 12, seed=5)
        self.wa, self.wb = nn.Parameter(base[:12]), nn.Parameter(base[12:], requires_grad=False)
        self.register_buffer("index", torch.tensor([3, 1, 2]))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("same", base[:12])

    def forward(self, x):
        return super().forward(
            x @ self.wa + (x @ self.wb)[..., self.index].sum(-1, keepdim=True) + x @ self.same
        ), self.empty


@add("tensor-attribute", **seq())
class TensorAttribute(Stack):
    """A plain tensor attribute, a list of tensors and a number made from a parameter."""

    def __init__(self):
        super().__init__()
        self.plain, self.table = t(12, seed=4), [t(12, seed=5), t(12, seed=6)]

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = self.block(layer, x * self.plain + self.table[i % 2])
        return self.head(self.norm(x))


@add("window-constant", **seq())
class WindowConstant(Stack):
    """Every block reads a table computed once from the input, and hands a running mean on beside the stream."""

    def forward(self, x):
        side = x.mean(1, keepdim=True)
        for layer in self.layers:
            x = x + layer["a"](x) + side
            side = 0.5 * side + x.mean(1, keepdim=True)
            x = x + layer["m"](x)
        return self.head(self.norm(x + side))


@add("deepnorm-post", **seq())
class DeepNormPost(Stack):
    """Post-norm with scaled skips."""

    def __init__(self):
        super().__init__()
        self.posts = nn.ModuleList(nn.LayerNorm(12) for _ in range(8))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = self.posts[2 * i](1.5 * x + layer["a"](x))
            x = self.posts[2 * i + 1](1.5 * x + layer["m"](x))
        return self.head(x)


@add("classify-ids", lambda: ((ids(2, 6),), {}), lambda: [((ids(3, 9, seed=1),), {})])
class ClassifyIds(Stack):
    """Token ids in, one label per row from the last real token out."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 12, padding_idx=0)

    def forward(self, input_ids):
        last = (input_ids != 0).sum(1) - 1
        y = super().forward(self.emb(input_ids))
        return y[torch.arange(y.shape[0]), last]


@add("log-probs", lambda: ((ids(2, 6),), {}), lambda: [((ids(3, 9, seed=1),), {})])
class LogProbs(ClassifyIds):
    """Answers are log-probabilities with the classes in dimension 1."""

    def forward(self, input_ids):
        y = Stack.forward(self, self.emb(input_ids))
        return y.log_softmax(-1).transpose(1, 2)


@add("one-class", **seq())
class OneClass(Stack):
    """A regression head of width 1: softmax of it is always 1."""

    def __init__(self):
        super().__init__(out=1)


@add(
    "loss-inside",
    lambda: ((t(2, 5, 12), ids(2, 5, high=5)), {}),
    lambda: [((t(3, 4, 12), ids(3, 4, high=5, seed=3)), {})],
)
class LossInside(Stack):
    """Returns (loss, logits): the exit has to be taken from the logits."""

    def forward(self, x, labels):
        y = super().forward(x)
        return F.cross_entropy(y.flatten(0, 1), labels.flatten()), y


@add("dropout-functional", **seq(), train=True)
class FunctionalDropout(Stack):
    """Handed over in train mode, with functional dropout on the stream and inside sdpa."""

    def block(self, layer, x):
        x = F.dropout(x + layer["a"](x), 0.3, self.training)
        q = x.unsqueeze(1)
        x = x + F.scaled_dot_product_attention(q, q, q, dropout_p=0.2 if self.training else 0.0).squeeze(1)
        return x + layer["m"](x)


def as_cases(cases: ModuleType) -> list[Any]:
    """The models as cases, so that the same runner takes them."""
    found = []
    for name, (make, example, alt) in MODELS.items():

        def build(make=make, example=example, name=name):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                model = make()
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.dim() == 1:
                            parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter.dtype))
            model.train(name in TRAIN)
            return model, *example()

        found.append(
            cases.Case(
                id=name,
                title=name,
                sources=(),
                trouble="",
                passes=(),
                expect="either",
                must="",
                build=build,
                alt=alt,
                train=name in TRAIN,
                tol=3e-2 if "bf16" in name or "mixed" in name else 1e-4,
            )
        )
    return found
