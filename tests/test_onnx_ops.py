"""Every translation of the direct emitter, against torch, in ONNX Runtime."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("onnxruntime")

import onnx_ir as ir
import onnxruntime as ort
from hcx.export.onnx_direct.build import build

R = torch.Generator().manual_seed(0)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=R)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=R)


X = (rand(3, 5, 8),)
XY = (rand(3, 5, 8), rand(3, 5, 8))
IMAGE = (rand(3, 4, 8, 8),)
INTS = (ints(9, 3, 5), ints(5, 3, 5) + 1)
MASK = rand(3, 5, 8) > 0
VALUES = torch.tensor([[-2.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.5], [3.0, -3.0, 7.5, -7.5, 0.1, -0.1, 2.0, -2.0]])

FLOATING = """exp sin cos tan tanh sigmoid erf abs neg sign floor ceil round square sinh cosh atan asinh
expm1""".split()
POSITIVE = "log sqrt rsqrt reciprocal log1p log2 log10".split()

# name: (function, inputs); the first two dimensions of every input are dynamic, but for the names in FIXED
POINTWISE = {
    **{n: (getattr(torch, n), X) for n in FLOATING},
    **{n: (getattr(torch, n), (rand(3, 5).abs() + 0.1,)) for n in POSITIVE},
    "trunc": (torch.trunc, (VALUES,)),
    "exp2": (torch.exp2, X),
    "asin": (torch.asin, (rand(3, 5).tanh(),)),
    "round half even": (torch.round, (VALUES,)),
    "isnan": (
        lambda x: torch.isnan(x) | torch.isinf(x) | ~torch.isfinite(x),
        (torch.tensor([[1.0, float("nan")], [float("inf"), -1.0]]),),
    ),
    "nan_to_num": (torch.nan_to_num, (torch.tensor([[1.0, float("nan")], [float("inf"), -float("inf")]]),)),
    "logical_not": (torch.logical_not, (ints(2, 3, 5),)),
    "bitwise_not": (lambda x: ~x, (MASK,)),
    "clamp": (lambda x: x.clamp(-1, 0.5) + x.clamp(min=0) + x.clamp(max=0.2), X),
    "clamp tensor": (lambda x, y: torch.clamp(x, min=y), XY),
    "clamp int": (lambda x: x.clamp(2, 5), (ints(9, 3, 5),)),
}
ACTIVATIONS = {
    **{
        n: (getattr(F, n), X)
        for n in "relu relu6 silu gelu elu selu celu softplus hardtanh hardsigmoid hardswish mish logsigmoid".split()
    },
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), X),
    "prelu": (lambda x, w: F.prelu(x, w), (rand(3, 5, 8), rand(5))),
    "glu": (lambda x: F.glu(x, -1), X),
    "softmax": (lambda x: x.softmax(-1) + x.log_softmax(1), X),
    "softmax dtype": (lambda x: F.softmax(x, -1, dtype=torch.float64), X),
    "relu int": (torch.relu, (ints(9, 3, 5) - 4,)),
    "dropout eval": (lambda x: F.dropout(x, 0.5, training=False), X),
}
BINARY = {
    "add": (lambda x, y: x + 2 * y + 1 - 0.5, XY),
    "add alpha": (lambda x, y: torch.add(x, y, alpha=3), XY),
    "rsub": (lambda x, y: 1 - x - torch.rsub(x, y, alpha=2), XY),
    "mul promote": (lambda x, y: x * y, (rand(3, 5), ints(9, 3, 5))),
    "int and float number": (lambda x: x * 0.5 + 1, (ints(9, 3, 5),)),
    "int minus mask": (lambda m: 1.0 - m, (ints(2, 3, 5),)),
    "bool plus bool": (lambda a: a + a, (MASK,)),
    "bool times int": (lambda a: a * 3, (MASK,)),
    "float64 scalar tensor": (lambda x: x * torch.tensor(2.0, dtype=torch.float64), X),
    "div": (lambda x, y: x / y, XY),
    "div int": (lambda x, y: x / y, INTS),
    "div floor": (lambda x, y: torch.div(x - 4, y, rounding_mode="floor"), INTS),
    "div trunc": (lambda x, y: torch.div(x - 4, y, rounding_mode="trunc"), INTS),
    "floor_divide": (lambda x, y: (x - 4) // y, INTS),
    "floor_divide float": (lambda x, y: x // y, XY),
    "remainder": (lambda x, y: (x - 4) % y, INTS),
    "remainder float": (lambda x, y: torch.remainder(x, y), XY),
    "fmod": (torch.fmod, XY),
    "maximum": (lambda x, y: torch.maximum(x, y) + torch.minimum(x, 2 * y), XY),
    "pow": (lambda x: x**2 + x**3 + x.abs() ** 0.5 + x.abs() ** 1.7 + 2**x, X),
    "compare": (lambda x, y: (x < y) | (x > 1) & (x <= 2) ^ (y >= 0) & (x != y) | (x == y), XY),
    "compare int float": (lambda x: x > 2.5, (ints(9, 3, 5),)),
    "compare bools": (lambda x: (x == x.flip(0)) & (x <= x.flip(1)), (MASK,)),
    "logical": (lambda x, y: torch.logical_and(x, y) | torch.logical_xor(x, y) & torch.logical_or(x, y), INTS),
    "bitwise int": (lambda x, y: (x & y) | (x ^ 3), INTS),
    "shift": (lambda x: (x >> 2) + (x << 1) + ((x - 4) >> 1), (ints(9, 3, 5),)),
    "shift bytes": (lambda x: (x >> 4) | (x << 3), (ints(255, 3, 5).to(torch.uint8),)),
    "where": (lambda x, y: torch.where(x > 0, x, y) + torch.where(x > 0, x, 0.0) + torch.where(x > 0, 1.0, y), XY),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -1e4).masked_fill(x < -1, float("-inf")), X),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), XY),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y, value=0.5) + torch.addcdiv(x, y, x.abs() + 1, value=2), XY),
}
SHAPES = {
    "view": (lambda x: x.view(x.shape[0], -1) * 1, X),
    "view symbolic": (
        lambda x: x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2).reshape(x.shape[0] * 2, x.shape[1], 4),
        X,
    ),
    "flatten": (lambda x: x.flatten(1) + x.flatten(1, 2), X),
    "unflatten": (lambda x: x.unflatten(-1, (2, 4)) + 0, X),
    "squeeze": (lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze((-1,)) + x[:, None].squeeze(), X),
    "permute": (lambda x: x.permute(2, 0, 1).movedim(0, -1).mT + 0, X),
    "t": (lambda x: x.t() + x.T, (rand(5, 3),)),
    "expand": (lambda x: x[:, None].expand(-1, 3, -1, -1) + 0, X),
    "expand new": (lambda x: x.expand(2, x.shape[0], x.shape[1], 8) + 0, X),
    "expand_as": (lambda x, y: x[:1].expand_as(y) + 0, XY),
    "slice": (lambda x: (x[:, 1:-1, ::2], x[-2:], x[..., 3:100]), X),
    "slice symbolic": (lambda x: x[:, : x.shape[1] // 2] + 0, (rand(3, 6, 8),)),
    "narrow": (lambda x: x.narrow(-1, 2, 3) + 0, X),
    "select": (lambda x: x[:, 0] + x[:, -1], X),
    "split": (lambda x: (x.split(3, -1), x.split([2, 6], -1), x.chunk(4, -1), x.unbind(-1)), X),
    "split dynamic": (lambda x: x.chunk(2, 1), (rand(3, 6, 8),)),
    "cat": (lambda x, y: torch.cat([x, y, torch.tensor([]), x], 1), XY),
    "cat promote": (lambda x, y: torch.cat([x, y]), (rand(3, 5), ints(9, 3, 5))),
    "stack": (lambda x, y: torch.stack([x, y], -1) + torch.stack([x, y], 3), XY),
    "repeat": (lambda x: (x.repeat(2, 1, 3), x.repeat(2, 1, 1, 1), x.tile((2,))), X),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 1), X),
    "repeat_interleave negative": (lambda x: x.repeat_interleave(2, -1), X),
    "flip roll": (lambda x: x.flip(0, 2) + x.roll(2, 1) + x.roll((1, -1), (1, 2)), X),
    "pad": (lambda x: (F.pad(x, (1, 2, 0, 3), value=7.0), F.pad(x, (-1, 1))), X),
    "pad reflect": (lambda x: F.pad(x, (1, 2), mode="reflect") + F.pad(x, (2, 1), mode="replicate"), X),
    "tril": (lambda x: x.tril() + x.triu(1) + x.tril(-1), X),
    "tril bool": (lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), X),
    "to": (lambda x: (x.to(torch.int64), x.to(torch.float64), x.bool(), x.int().float(), x.half()), X),
    "type_as": (lambda x, y: x.type_as(y), INTS),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), IMAGE),
    "numel of shape": (lambda x: x.sum() / (x.shape[0] * x.shape[1]) + x.shape[1] % 3 - (-x.shape[0] // 2), X),
}
CREATE = {
    "arange": (
        lambda x: torch.arange(x.shape[1]) + torch.arange(2, x.shape[1] + 2) + torch.arange(0, 2 * x.shape[1], 2),
        X,
    ),
    "arange float": (lambda x: torch.arange(0, 8, 2, dtype=torch.float32) * torch.arange(4.0), X),
    "full": (lambda x: torch.full((x.shape[0], 4), 2.5) + x.new_full((4,), 1) + x[:, 0, :4].new_ones(4), X),
    "like": (lambda x: torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 3) + x.new_zeros(8), X),
    "like int": (lambda x: torch.ones_like(x, dtype=torch.int64) + torch.zeros(8, dtype=torch.int64), X),
    "full bool": (lambda x: torch.full((x.shape[1],), True), X),
    "full symbolic value": (lambda x: torch.full((2,), x.shape[1]), X),
    "one_hot": (lambda x: F.one_hot(x, 9), (ints(9, 3, 5),)),
    "eye": (lambda x: torch.eye(8) + x[0, 0], X),
    "scalar_tensor": (lambda x: x + torch.scalar_tensor(3.0), X),
}
REDUCE = {
    "sum": (lambda x: (x.sum(), x.sum(1), x.sum((0, -1), keepdim=True)), X),
    "sum bool": (lambda x: (x > 0).sum(-1), X),
    "mean": (lambda x: (x.mean(), x.mean(1), x.mean((0, -1), keepdim=True)), X),
    "mean dtype": (lambda x: x.mean(-1, dtype=torch.float64), X),
    "prod": (lambda x: x.prod(1), X),
    "amax": (lambda x: (x.amax((0, 1)), x.amin(-1, keepdim=True), x.max(), x.min(), x.amax()), X),
    "max dim": (lambda x: (*x.max(-1), *x.min(1, keepdim=True)), X),
    "any all": (lambda x: ((x > 1).any(), (x > 1).any(-1), (x > -9).all(1, keepdim=True), (x > -9).all()), X),
    "any int": (lambda x: x.any(-1), (ints(2, 3, 5),)),
    "argmax": (lambda x: (x.argmax(-1), x.argmax(), x.argmin(1, keepdim=True)), X),
    "logsumexp": (lambda x: (x.logsumexp(-1), (100 * x).logsumexp((0, 1), keepdim=True)), X),
    "var": (
        lambda x: (
            x.var(-1),
            x.var((1, 2), unbiased=False),
            x.std(1, keepdim=True),
            torch.var_mean(x, -1, correction=0),
        ),
        X,
    ),
    "norm": (lambda x: (x.norm(dim=-1), F.normalize(x, dim=1), torch.linalg.vector_norm(x, 1, dim=(0, 1))), X),
    "cumsum": (lambda x: x.cumsum(1), X),
    "cumsum int": (lambda x: x.cumsum(-1), (ints(2, 3, 5),)),
    "cumsum bool": (lambda x: x.cumsum(-1), (MASK,)),
    "topk": (lambda x: (*x.topk(3), *x.topk(2, 1, largest=False)), X),
    "sort": (lambda x: (*x.sort(-1), x.argsort(1, descending=True)), X),
}
LINEAR = {
    "linear": (
        lambda x, w, b: (F.linear(x, w, b), F.linear(x, w), F.linear(x[0], w, b), F.linear(x[0, 0], w, b)),
        (*X, rand(4, 8), rand(4)),
    ),
    "linear no rows": (lambda x, w: F.linear(x[:, :0], w), (*X, rand(4, 8))),
    "matmul": (
        lambda x, y: (
            x @ y.mT,
            torch.bmm(x, y.mT),
            x[0] @ y[0].t(),
            torch.mv(x[0], y[0, 0]),
            torch.dot(x[0, 0], y[0, 0]),
        ),
        XY,
    ),
    "addmm": (
        lambda x, w, b: torch.addmm(b, x[0], w, beta=2, alpha=0.5) + torch.addmm(b, x[0], w),
        (*X, rand(8, 4), rand(4)),
    ),
    "baddbmm": (lambda x, y: torch.baddbmm(x[:, :, :5], x, y.mT, beta=0.5, alpha=2), XY),
    "outer": (lambda x: torch.outer(x[0, 0], x[0, 1]), X),
    "einsum": (lambda x, y: torch.einsum("bsd,btd->bst", x, y) + torch.einsum("b s d, b t d -> b s t", x, y), XY),
    "embedding": (lambda i, w: F.embedding(i, w, padding_idx=0), (ints(9, 3, 5), rand(9, 4))),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), (rand(3, 4, 9), rand(6, 4, 3), rand(6))),
    "conv1d same": (lambda x, w: F.conv1d(x, w, padding="same", dilation=2), (rand(3, 4, 9), rand(6, 4, 2))),
    "conv1d unbatched": (lambda x, w: F.conv1d(x, w), (rand(4, 9), rand(6, 4, 3))),
    "conv2d": (
        lambda x, w: F.conv2d(x, w, stride=(1, 2), padding=(1, 0), dilation=(2, 1), groups=2),
        (*IMAGE, rand(6, 2, 3, 3)),
    ),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), (rand(2, 3, 5, 5, 5), rand(4, 3, 3, 3, 3))),
    "conv_transpose": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
        (*IMAGE, rand(4, 3, 3, 3)),
    ),
}
NORMS = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b) + F.layer_norm(x, (8,)), (*X, rand(8), rand(8))),
    "layer_norm two": (lambda x, w: F.layer_norm(x, (5, 8), w), (*X, rand(5, 8))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w, 1e-5) + F.rms_norm(x, (8,)), (*X, rand(8))),
    "rms_norm by hand": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), (*X, rand(8))),
    "batch_norm": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
        (*IMAGE, rand(4), rand(4).abs() + 0.1, rand(4), rand(4)),
    ),
    "batch_norm plain": (lambda x, m, v: F.batch_norm(x, m, v, eps=1e-3), (rand(3, 4), rand(4), rand(4).abs() + 0.1)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b) + F.group_norm(x, 4), (*IMAGE, rand(4), rand(4))),
    "instance_norm": (lambda x: F.instance_norm(x), IMAGE),
}
POOLS = {
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, stride=2, padding=1) + F.max_pool2d(x, 2), IMAGE),
    "max_pool2d ceil": (lambda x: F.max_pool2d(x, 3, stride=2, ceil_mode=True), IMAGE),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (rand(3, 4, 8),)),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 1, 1) + F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), IMAGE),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), (rand(3, 4, 8),)),
    "adaptive": (
        lambda x: F.adaptive_avg_pool2d(x, 1) + F.adaptive_avg_pool2d(x, (4, 2)).mean((2, 3), keepdim=True),
        IMAGE,
    ),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2) + F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGE),
    "upsample corners": (lambda x: F.interpolate(x, size=(5, 7), mode="bilinear", align_corners=True), IMAGE),
}
INDEXING = {
    "gather": (lambda x, i: x.gather(1, i), (rand(3, 5), ints(5, 3, 2))),
    "index_select": (lambda x: x.index_select(1, torch.tensor([2, 0])), X),
    "index one": (lambda x, i: (x[i], x[:, i[:, 0]]), (rand(3, 5, 8), ints(3, 3, 2))),
    "index two": (lambda x, i: (x[i[:, 0], i[:, 1]], x[i[:, :1], i[:, 1][None]]), (rand(3, 5, 8), ints(3, 3, 2))),
    "index middle": (lambda x, i: x[:, i[:, :1], i[:, 1][None]], (rand(3, 5, 8), ints(3, 3, 2))),
    "index apart": (lambda x, i: x[i[:, 0], :, i[:, 1]], (rand(3, 5, 8), ints(3, 3, 2))),
    "index negative": (lambda x: x[torch.tensor([-1, 0])], X),
    "index by arange": (lambda x: x[torch.arange(x.shape[0]), -1], X),
    "index mask": (lambda x: x[x[:, 0, 0] > 0], X),
    "scatter": (
        lambda x, i: x.scatter(1, i, 1.5) + x.scatter_add(1, i, x[:, :2]) + x.scatter(1, i, x[:, :2]),
        (rand(3, 5), torch.tensor([[0, 1], [2, 3], [4, 0]])),
    ),
    "index_put": (
        lambda x, i: (
            x.index_put((i[:, 0],), torch.tensor(2.0)) + x.index_put((i[:, 0], i[:, 1]), x[:, 0], accumulate=True)
        ),
        (rand(3, 5, 8), ints(3, 3, 2)),
    ),
    "index_put mask": (lambda x: x.index_put((x > 0,), torch.tensor(2.0)), X),
    "take_along_dim": (lambda x: torch.take_along_dim(x, x.argsort(-1), -1), X),
    "nonzero": (lambda x: (x > 0).nonzero(), X),
    "masked_select": (lambda x: x.masked_select(x > 0), X),
}
INPLACE = {
    "add_": (lambda x: (x * 1).add_(1).mul_(2).relu_() + 1, X),
    "later use": (lambda x: _later_use(x), X),
    "fill_": (lambda x: torch.zeros_like(x).fill_(3.0) + x.clone().zero_() + x, X),
    "copy_": (lambda x, y: x.clone().copy_(y[0]) + 0, XY),
    "masked_fill_": (lambda x: x.clone().masked_fill_(x > 0, 0.0), X),
}
COMPLEX = {
    "rope": (
        lambda x: torch.view_as_real(
            torch.view_as_complex(x.view(3, 5, 4, 2)) * torch.polar(torch.ones(5, 4), torch.arange(20.0).view(5, 4))
        ).flatten(2),
        X,
    ),
    "moved": (
        lambda x: torch.view_as_real(
            (torch.view_as_complex(x.view(3, 5, 4, 2))[:, 1:].transpose(0, 1).unsqueeze(1) * 2.0)[..., 0]
        ),
        X,
    ),
    "parts": (lambda x: torch.complex(x, x + 1).conj().real + torch.complex(x, 2 * x).imag, X),
}
ALL = (
    POINTWISE | ACTIVATIONS | BINARY | SHAPES | CREATE | REDUCE | LINEAR | NORMS | POOLS | INDEXING | INPLACE | COMPLEX
)
FIXED = {
    "rope",
    "moved",
    "layer_norm two",
    "batch_norm plain",
    "pad reflect",
    "conv1d unbatched",
    "eye",
    "instance_norm",
}
"""Functions that fix sizes themselves."""


def _later_use(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y
    y += 1
    return z * y


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return torch.utils._pytree.tree_leaves(self.function(*inputs))


def exported(function, inputs: tuple, dynamic: bool) -> torch.fx.GraphModule:
    auto = torch.export.Dim.AUTO
    shapes = tuple({a: auto for a in range(min(2, t.dim()))} if dynamic else {} for t in inputs)
    with torch.no_grad():
        program = torch.export.export(Function(function), inputs, dynamic_shapes=(shapes,), strict=False)
    return program.module(check_guards=False)


def emit(module: torch.fx.GraphModule, count: int, opset: int = 23, **options) -> ir.Model:
    fakes = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    dims = [tuple(s if isinstance(s, int) else f"d{i}_{a}" for a, s in enumerate(f.shape)) for i, f in enumerate(fakes)]
    return build(
        module, [f"in{i}" for i in range(len(fakes))], dims, [f"out{i}" for i in range(count)], opset=opset, **options
    )


def run(model: ir.Model, inputs: tuple) -> list[torch.Tensor]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), options)
    return [torch.from_numpy(a) for a in session.run(None, {f"in{i}": t.numpy() for i, t in enumerate(inputs)})]


def check(function, inputs: tuple, opset: int = 23, dynamic: bool = True) -> ir.Model:
    """Emit, run, compare values, dtypes and shapes; also the declared output types."""
    expected = Function(function)(*[t.clone() for t in inputs])
    model = emit(exported(function, inputs, dynamic), len(expected), opset)
    got = run(model, inputs)
    for value, g, e in zip(model.graph.outputs, got, expected, strict=True):
        assert g.dtype == e.dtype
        assert value.dtype.numpy() == e.numpy().dtype
        torch.testing.assert_close(g, e, rtol=1e-5, atol=2e-5, equal_nan=True)
    return model


@pytest.mark.parametrize("name", ALL)
def test_agrees_with_torch(name):
    function, inputs = ALL[name]
    check(function, inputs, dynamic=name not in FIXED)


@pytest.mark.parametrize("opset", [18, 20, 26])
@pytest.mark.parametrize(
    "name",
    [
        "gelu",
        "gelu tanh",
        "rms_norm",
        "group_norm",
        "amax",
        "pad",
        "split",
        "pow",
        "cat",
        "upsample",
        "topk",
        "max_pool2d",
    ],
)
def test_other_opsets(name, opset):
    function, inputs = ALL[name]
    assert check(function, inputs, opset).opset_imports[""] == opset


def test_every_file_of_operators_registers_some():
    """A new file in ops/ is found by being there; one that registers nothing is a mistake."""
    from hcx.export.onnx_direct import ops
    from hcx.export.onnx_direct.ops.registry import TABLE

    homes = {translator.emit.__module__.rpartition(".")[2] for translator in TABLE.values()}
    assert set(ops.FILES) - {"registry"} == homes
