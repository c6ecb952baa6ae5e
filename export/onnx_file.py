"""Writes an ONNX model without copying its weights in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

LARGE = 1024
"""Bytes from which a tensor is streamed, or goes to the data file."""

ALIGNMENT = 64
"""Of tensors in the data file; weights are multiples of it, so it costs nothing."""


def write(model: ir.Model, path: Path, *, external: bool) -> Path | None:
    """Write ``path``, and with ``external`` the weights to ``path.data`` beside it; returns the data file.

    A protobuf of 0.5 GB made the ordinary way is held four times in memory; here only the small part is.
    """
    large = {n: v for n, v in model.graph.initializers.items() if v.const_value.nbytes >= LARGE}
    if external and large:
        data = path.with_name(path.name + ".data")
        _write_data(large, data)
        path.write_bytes(ir.serde.serialize_model(model).SerializeToString())
        return data
    for name in large:
        del model.graph.initializers[name]
    try:
        proto = ir.serde.serialize_model(model)
    finally:
        for value in large.values():
            model.graph.register_initializer(value)
    _write_inline(proto, large, path)
    return None


def _write_data(large: dict[str, ir.Value], data: Path) -> None:
    """The weights one after the other; the model then refers to the bare file name."""
    with open(data, "wb") as file:
        for name, value in large.items():
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            offset, tensor = file.tell(), value.const_value
            file.write(_raw(tensor))
            value.const_value = ir.ExternalTensor(
                data.name, offset, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=name, base_dir=data.parent
            )


def _write_inline(proto: onnx.ModelProto, large: dict[str, ir.Value], path: Path) -> None:
    """The graph message is written by hand: its small fields, then each weight as one ``initializer`` field."""
    body = proto.graph.SerializeToString()
    proto.ClearField("graph")
    heads = {name: _tensor_head(name, value.const_value) for name, value in large.items()}
    entries = {n: len(heads[n]) + v.const_value.nbytes for n, v in large.items()}
    field = _field(onnx.GraphProto, "initializer")
    total = len(body) + sum(len(field) + len(_varint(size)) + size for size in entries.values())
    with open(path, "wb") as file:
        file.write(proto.SerializeToString())
        file.write(_field(onnx.ModelProto, "graph") + _varint(total) + body)
        for name, value in large.items():
            file.write(field + _varint(entries[name]) + heads[name])
            file.write(_raw(value.const_value))


def _tensor_head(name: str, tensor: ir.TensorProtocol) -> bytes:
    """A TensorProto up to the bytes of its ``raw_data``."""
    proto = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=[int(d) for d in tensor.shape])
    return proto.SerializeToString() + _field(onnx.TensorProto, "raw_data") + _varint(tensor.nbytes)


def _raw(tensor: ir.TensorProtocol) -> memoryview:
    return memoryview(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8))


def _field(message: type, name: str) -> bytes:
    """Protobuf tag of a length-delimited field."""
    return _varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | 2)


def _varint(number: int) -> bytes:
    return bytes(_seven_bits(number))


def _seven_bits(number: int) -> Iterator[int]:
    while number > 127:
        yield number & 127 | 128
        number >>= 7
    yield number
