"""Runs an exported file like the model it came from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.errors import SourceError, UsageError

SIGNATURE = "hcx.signature"
"""Key in the file's metadata: how the source model is called and what it returns."""


class OnnxSession:
    """An ONNX file on ONNX Runtime (CPU), called with torch tensors.

    A file written by :func:`hcx.export.to_onnx` is called with the source model's own arguments and returns its output
    structure. Any other ONNX file takes its inputs by position or name and returns a dict by output name.

    Args:
        path: the file, or a folder that holds ``model.onnx``.
        optimize: False turns ONNX Runtime's graph optimisations off.
        threads: of one operator; None leaves it to ONNX Runtime.

    Raises:
        SourceError: no such file, or ONNX Runtime cannot load it.

    Example::

        session = OnnxSession("smollm2.onnx")
        logits = session(input_ids=ids).logits
    """

    def __init__(self, path: str | os.PathLike[str], *, optimize: bool = True, threads: int | None = None):
        self.path = Path(path) / "model.onnx" if Path(path).is_dir() else Path(path)
        if not self.path.is_file():
            raise SourceError(
                f"no ONNX file at {self.path}", where=str(path), hint="pass a .onnx file or a folder with model.onnx"
            )
        self._session = load(self.path, optimize=optimize, threads=threads)
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        self.input_names = [i.name for i in self._session.get_inputs()]
        self.output_names = [o.name for o in self._session.get_outputs()]
        self.signature = _signature(self.metadata.get(SIGNATURE))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call with the source model's arguments; returns its output structure.

        Raises:
            UsageError: arguments that do not fit the signature, or that the graph cannot take.
        """
        if self.signature is None:
            return dict(zip(self.output_names, self.run_flat(self._by_name(args, kwargs)), strict=True))
        outputs = self.run_flat(self.signature.bind(args, kwargs))
        return self.signature.rebuild(outputs[: len(self.signature.outputs.names)])

    def run_flat(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Flat tensors in the order of ``input_names`` → flat tensors in the order of ``output_names``."""
        feed = {name: _to_numpy(t) for name, t in zip(self.input_names, inputs, strict=True)}
        try:
            return [torch.from_numpy(array) for array in self._session.run(None, feed)]
        except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
            shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(self.input_names, inputs, strict=True))
            raise UsageError(
                f"ONNX Runtime refused the call: {first_line(error)}",
                where=shapes[:500],
                hint=f"check shapes and dtypes against the file's inputs in {self.path}",
            ) from error

    def greedy(
        self,
        input_ids: torch.Tensor,
        steps: int,
        *,
        attention_mask: torch.Tensor | None = None,
        inputs: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Prompt and ``steps`` greedy tokens of a decoder, through its cache.

        As :func:`hcx.rewrite.run.generation.greedy`.

        Raises:
            UsageError: the file is not a decoder written by hcx.
        """
        from hcx.rewrite.run.generation import decode

        if self.signature is None:
            raise UsageError(
                "the file does not say how the model is called",
                where=str(self.path),
                hint="export it with hcx.export.to_onnx",
            )
        names = self.signature.outputs.names
        return decode(
            self.signature, self.run_flat, names, input_ids, steps, attention_mask=attention_mask, inputs=inputs
        )[0]

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        given = dict(zip(self.input_names, args, strict=False)) | kwargs
        missing = [n for n in self.input_names if n not in given]
        unknown = [n for n in given if n not in self.input_names]
        if missing or unknown or len(args) > len(self.input_names):
            wrong = (
                f"input `{missing[0]}` is missing"
                if missing
                else f"unknown input `{unknown[0]}`"
                if unknown
                else "too many inputs"
            )
            raise UsageError(wrong, where=str(self.path), hint="the file takes " + ", ".join(self.input_names))
        return [given[n] for n in self.input_names]


def load(path: Path, *, optimize: bool = True, threads: int | None = None) -> Any:
    """An ONNX Runtime session on the CPU; its log stays off stderr, errors are raised."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    options.log_severity_level = 4
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's, as above
        raise SourceError(
            f"ONNX Runtime cannot load the file: {first_line(error)}",
            where=str(path),
            hint="the file is damaged, or uses operators or types that ONNX Runtime lacks on CPU",
        ) from error


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:400]


def _to_numpy(value: Any) -> Any:
    """bfloat16 is given as float32: that is what a file written with ``upcast`` takes."""
    tensor = (value if isinstance(value, torch.Tensor) else torch.as_tensor(value)).detach().cpu()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).contiguous().numpy()


def _signature(text: str | None) -> Any:
    if text is None:
        return None
    from hcx.rewrite.ir.signature import CallSignature

    return CallSignature.from_json(json.loads(text))
