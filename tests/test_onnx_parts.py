"""Parts of the ONNX exporter by themselves: graphs as text, stored tensors, the file writer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

pytest.importorskip("onnxruntime")

import onnx
import onnx_ir as ir
import onnxruntime as ort
import sympy
from hcx.export import dedup, onnx_file
from hcx.export.onnx_direct import mutation
from hcx.export.onnx_direct.build import build
from hcx.export.onnx_direct.emitting.emitter import Emitter, Operand
from hcx.export.onnx_direct.emitting.symbols import dim_text, named
from hcx.export.onnx_direct.emitting.unsupported import UnsupportedError
from hcx.export.onnx_direct.ops import registry

AUTO = torch.export.Dim.AUTO


def exported(model: nn.Module, *inputs: torch.Tensor, fixed: tuple[int, ...] = ()) -> fx.GraphModule:
    """The flat graph with every dimension dynamic that the model leaves open, but for fixed axes."""
    shapes = tuple(dict.fromkeys([a for a in range(t.dim()) if a not in fixed], AUTO) for t in inputs)
    shapes = (shapes,) if isinstance(model, Function) else shapes
    with torch.no_grad():
        return torch.export.export(model.eval(), inputs, dynamic_shapes=shapes, strict=False).module(check_guards=False)


def emit(
    model: nn.Module, *inputs: torch.Tensor, dims=None, outputs: int = 1, fixed: tuple[int, ...] = (), **options
) -> ir.Model:
    module = exported(model, *inputs, fixed=fixed)
    dims = dims or [tuple(f"d{i}_{a}" for a in range(t.dim())) for i, t in enumerate(inputs)]
    names = [f"in{i}" for i in range(len(inputs))]
    return build(module, names, dims, [f"out{i}" for i in range(outputs)], opset=options.pop("opset", 23), **options)


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


class Function(nn.Module):
    def __init__(self, function, **parameters):
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *inputs):
        return self.function(self, *inputs)


# ---- one to one


def test_linear_keeps_its_weight():
    model = emit(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 5, 4), dims=[("batch", "length", 4)])
    assert kinds(model) == ["Reshape", "Gemm", "Shape", "Shape", "Concat", "Reshape", "Relu"]
    gemm = next(n for n in model.graph if n.op_type == "Gemm")
    assert gemm.attributes["transB"].as_int() == 1
    assert [v.name for v in gemm.inputs[1:]] == ["0.weight", "0.bias"] and gemm.name == "0/Gemm"
    assert [str(d) for d in model.graph.outputs[0].shape] == ["batch", "length", "3"]


def test_no_nodes_for_nothing():
    """Copies, whole slices, ×1, +0 and casts to the same dtype leave no trace but the output's own name."""
    model = emit(
        Function(lambda s, x: (x.float().contiguous()[:] * 1.0 + 0).clone().reshape(x.shape)), torch.randn(2, 3)
    )
    assert kinds(model) == ["Identity"]


def test_equal_nodes_are_one():
    model = emit(Function(lambda s, x: x.view(x.shape[0], -1).exp() + x.flatten(1).exp()), torch.randn(2, 3, 4))
    assert kinds(model).count("Exp") == 1 and kinds(model).count("Reshape") == 1


def test_reshape_of_reshape_is_one():
    model = emit(Function(lambda s, x: x.view(-1).view(x.shape[1], -1).view(x.shape[0], x.shape[1])), torch.randn(2, 3))
    assert kinds(model).count("Reshape") == 1


def test_sizes_with_one_name_are_one_size():
    """Two caches of independent symbols in the trace, one name in the Program."""
    model = emit(
        Function(
            lambda s, a, b: (
                a[:, None].expand(-1, b.shape[0], -1) + b[:, None].expand(-1, a.shape[0], -1).transpose(0, 1)
            )
        ),
        torch.randn(4, 6),
        torch.randn(5, 6),
        dims=[("past", 6), ("past+sequence", 6)],
        fixed=(1,),
    )
    assert [str(d) for d in model.graph.outputs[0].shape] == ["past", "past+sequence", "6"]


def test_tied_and_repeated_weights():
    layer, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    twin.weight = layer.weight
    model = emit(Function(lambda s, x: twin(layer(layer(x)))), torch.randn(2, 4))
    model_of_modules = emit(nn.Sequential(layer, layer, twin), torch.randn(2, 4))
    for m in (model, model_of_modules):
        assert sum(v.const_value.numpy().shape == (4, 4) for v in m.graph.initializers.values()) == 1


def test_dim_text():
    past, total = named("past"), named("past+sequence")
    assert dim_text(3) == 3 and dim_text(past) == "past" and dim_text(total) == "past+sequence"
    assert dim_text(total - sympy.Symbol("sequence", integer=True, nonnegative=True)) == "past"
    assert " " not in dim_text(2 * past * total)


@pytest.mark.parametrize("a, b", [(7, 2), (-7, 2), (7, -2), (-7, -2), (6, 3), (-6, 3)])
def test_floor_division(a, b):
    from hcx.export.onnx_direct.emitting.symbols import floor_divide

    e = Emitter(23)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
    out = floor_divide(e, x, e.const([b]))
    out.name, out.type, out.shape = "y", x.type, x.shape
    graph = ir.Graph(
        [x], [out], nodes=e.nodes, initializers=list(e.initializers.values()), opset_imports={"": 23}, name="g"
    )
    session = ort.InferenceSession(ir.serde.serialize_model(ir.Model(graph, ir_version=11)).SerializeToString())
    assert session.run(None, {"x": np.array([a])})[0].tolist() == [a // b]


# ---- patterns


def rms(s, x):
    return s.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_rms_norm_is_one_node():
    model = Function(rms, w=torch.randn(8))
    assert kinds(emit(model, torch.randn(2, 8))) == ["RMSNormalization"]
    assert "RMSNormalization" not in kinds(emit(model, torch.randn(2, 8), opset=22))
    assert "RMSNormalization" not in kinds(emit(model, torch.randn(2, 8), fuse=False))


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: s.w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)),
        lambda s, x: s.w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6)),
        lambda s, x: s.w * (x.relu() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        lambda s, x: s.w[:1] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    ],
    ids=["other axis", "cube", "other value", "one factor"],
)
def test_what_is_not_rms_norm(function):
    assert "RMSNormalization" not in kinds(emit(Function(function, w=torch.randn(8)), torch.randn(8, 8)))


def rotary(x, angles, half_first=True, repeat=True):
    table = torch.cat([angles, angles if repeat else angles * 2], -1)
    cos, sin = table.cos().unsqueeze(1), table.sin().unsqueeze(1)
    a, b = x[..., :4], x[..., 4:]
    return x * cos + torch.cat([-b, a] if half_first else [b, -a], -1) * sin


def run(model: ir.Model, *inputs: torch.Tensor) -> torch.Tensor:
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    return torch.from_numpy(session.run(None, {f"in{i}": t.numpy() for i, t in enumerate(inputs)})[0])


@pytest.mark.parametrize("half_first", [True, False])
@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_rotary(half_first, repeat, batch):
    """Fused only where both halves of the tables agree; tables of batch 1 are broadcast first."""
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(batch, 5, 4)
    function = Function(lambda s, x, angles: rotary(x, angles, half_first, repeat))
    model = emit(function, x, angles, fixed=(3,))
    assert ("RotaryEmbedding" in kinds(model)) == (half_first and repeat)
    torch.testing.assert_close(run(model, x, angles), function(x, angles), atol=1e-6, rtol=1e-5)


def test_grouped_attention_reads_the_heads_once():
    def function(s, q, k, v):
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(t.shape[0], 4, t.shape[2], 8) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    tensors = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    model = emit(Function(function), *tensors, fixed=(1, 3))
    assert "Expand" not in kinds(model) and "Attention" in kinds(model)
    torch.testing.assert_close(run(model, *tensors), function(None, *tensors), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("opset", [18, 23, 26])
@pytest.mark.parametrize(
    "case", ["plain", "causal", "long", "float mask", "empty rows", "minus inf", "lowest", "rank 3", "gqa", "scale"]
)
def test_attention(case, opset):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    options: dict = {}
    if case in ("causal", "long"):
        options["is_causal"] = True
        k = torch.randn(2, 4, 9, 8) if case == "long" else k
    if case == "float mask":
        options["attn_mask"] = torch.randn(2, 1, 5, 5)
    if case in ("empty rows", "minus inf", "lowest"):
        mask = torch.rand(2, 1, 5, 5) > 0.5
        mask[0, 0, 1] = False
        hidden = float("-inf") if case == "minus inf" else torch.finfo(torch.float32).min
        options["attn_mask"] = mask if case == "empty rows" else torch.zeros(mask.shape).masked_fill(~mask, hidden)
    if case == "rank 3":
        q, k = q[:, 0], k[:, 0]
    if case == "gqa":
        k, options["enable_gqa"] = k[:, :2], True
    if case == "scale":
        options["scale"] = 0.3
    mask = options.pop("attn_mask", None)
    inputs = [q, k] if mask is None else [q, k, mask]
    function = Function(
        lambda s, q, k, *m: F.scaled_dot_product_attention(q, k, k * 2, attn_mask=m[0] if m else None, **options)
    )
    expected = function(*inputs)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(
        run(emit(function, *inputs, opset=opset, fixed=(2,) if case == "rank 3" else (1, 3)), *inputs),
        expected,
        atol=1e-5,
        rtol=1e-5,
    )


# ---- branches, definitions, in-place operators


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        return torch.cond(h.sum() > 0, lambda v: self.b(v).relu() + v, lambda v: v * 2, (h,)) + 1


def test_cond_is_if():
    torch.manual_seed(0)
    module = Branches().eval()
    model = emit(module, torch.randn(3, 8))
    assert kinds(model).count("If") == 1
    assert {"a.weight", "b.weight"} <= set(model.graph.initializers)
    signs = set()
    for seed in range(6):
        x = torch.randn(seed + 2, 8, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(run(model, x), module(x), atol=1e-5, rtol=1e-5)
        signs.add(bool(module.a(x).sum() > 0))
    assert signs == {True, False}


def test_own_operators_through_their_definition():
    import hcx.kernels  # noqa: F401

    def function(s, x):
        streams = torch.ops.hcx.stream_expand(x, torch.ones(3))
        streams = torch.ops.hcx.stream_write(streams, x * 2, s.mix, torch.tensor([1.0, 0.5, 0.0]))
        return torch.ops.hcx.stream_read(streams, torch.tensor([0.2, 0.3, 0.5]))

    module = Function(function, mix=torch.randn(3, 3))
    x = torch.randn(2, 4, 8)
    model = emit(module, x)
    assert "mix" in model.graph.initializers
    torch.testing.assert_close(run(model, x), module(x), atol=1e-5, rtol=1e-5)


def test_aliased_mutation_is_refused():
    def function(s, x):
        y = x * 1
        row = y[:, 0]
        y.mul_(2)
        return row + y[:, 1]

    with pytest.raises(mutation.AliasedError, match="mul_"):
        emit(Function(function), torch.randn(3, 4))


def test_view_read_before_the_mutation_is_fine():
    def function(s, x):
        y = x * 1
        early = y.view(-1).sum()
        y.mul_(2)
        return y + early

    x = torch.randn(3, 4)
    torch.testing.assert_close(run(emit(Function(function), x), x), function(None, x))


def test_changed_buffer_is_refused():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count.add_(1)
            return x + self.count

    with pytest.raises(UnsupportedError, match="count"):
        emit(Counts(), torch.randn(3, 4))


def test_no_argument_is_ignored_in_silence():
    """An argument that a translator does not name must have its default."""
    translator = registry.TABLE["aten.relu.default"]
    with pytest.raises(UnsupportedError, match="alpha"):
        registry.arguments(
            torch.ops.aten.add.Tensor,
            registry.Translator(translator.emit, frozenset({"x", "other"})),
            (1, 2),
            {"alpha": 3},
        )
    for name in registry.TABLE:
        plain = name.removeprefix(registry.COMPLEX)
        namespace, base, overload = plain.split(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        assert (packet is not None and overload in packet.overloads()) or name == "aten.prelu.default", name


def test_promotion():
    e = Emitter(23)
    wide, scalar = (Operand(None, torch.int64, (3,)), Operand(None, torch.float64, ()))
    half = Operand(None, torch.float16, (3,))
    assert e.promote(wide, scalar) is torch.float64 and e.promote(half, scalar) is torch.float16
    assert (
        e.promote(wide, 1) is torch.int64
        and e.promote(wide, 1.5) is torch.float32
        and e.promote(half, 2.5) is torch.float16
    )
    assert e.promote(Operand(None, torch.bool, (3,)), 1) is torch.int64


# ---- stored tensors and the file


def graph_with(**arrays: np.ndarray) -> ir.Graph:
    values = []
    for name, array in arrays.items():
        tensor = ir.tensor(array, name=name)
        values.append(ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape))
    nodes = [ir.node("Identity", [v], name=f"n{i}") for i, v in enumerate(values)]
    for index, node in enumerate(nodes):
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = (
            f"o{index}",
            values[index].type,
            values[index].shape,
        )
    return ir.Graph(
        [], [n.outputs[0] for n in nodes], nodes=nodes, initializers=values, opset_imports={"": 23}, name="g"
    )


def test_merge_equal_compares_bits():
    nan = np.array([np.nan, 1], np.float32)
    graph = graph_with(
        a=nan,
        b=nan.copy(),
        c=np.array([0.0], np.float32),
        d=np.array([-0.0], np.float32),
        e=np.array([[0.0]], np.float32),
        f=np.array([0.0], np.float64),
        g=np.arange(1000, dtype=np.float32),
        h=np.arange(1000, dtype=np.float32),
    )
    graph.initializers["h"].const_value.numpy()[7] += 1
    dedup.merge_equal(graph, ["b"])
    assert sorted(graph.initializers) == ["b", "c", "d", "e", "f", "g", "h"]
    assert [n.inputs[0].name for n in graph][:2] == ["b", "b"]
    assert dedup.aliases(graph, {"a": ir.tensor(nan), "b": ir.tensor(nan), "z": ir.tensor(np.ones(3))}) == {"a": "b"}


@pytest.mark.parametrize("external", [False, True])
def test_written_file_is_what_onnx_reads(tmp_path, external):
    arrays = {
        "big": np.random.randn(40, 70).astype(np.float32),
        "small": np.arange(3),
        "half": np.ones(900, np.float16),
        "flag": np.array(True),
    }
    model = ir.Model(graph_with(**arrays), ir_version=11)
    model.metadata_props["k"] = "v"
    data = onnx_file.write(model, tmp_path / "m.onnx", external=external)
    assert (data is None) != external
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    proto = onnx.load(tmp_path / "m.onnx")
    read = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert set(read) == set(arrays) and proto.metadata_props[0].value == "v"
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype and np.array_equal(read[name], array)
    assert set(model.graph.initializers) == set(arrays)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**31, 2**40 + 5])
def test_varint(number):
    decoded = sum((byte & 127) << 7 * i for i, byte in enumerate(onnx_file._varint(number)))
    assert decoded == number
