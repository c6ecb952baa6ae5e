"""What an export wrote and how it was checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """One run of the file in ONNX Runtime against the Program.

    Attributes:
        optimized: with ONNX Runtime's graph optimisations (else with all of them off).
        shapes: input shapes by name.
        max_error: largest absolute difference over the floating outputs.
        scale: largest absolute value of the reference outputs.
        top1_equal: whether the largest entry along the last dimension is at the same place everywhere.
    """

    optimized: bool
    shapes: dict[str, tuple[int, ...]]
    max_error: float
    scale: float
    top1_equal: bool


@dataclass
class OnnxReport:
    """Result of :func:`hcx.export.to_onnx`.

    Attributes:
        path: the model file.
        data: the file with the weights, when they are beside the model.
        companions: other files written (tokenizer, configuration).
        producer: ``direct`` or ``torch``.
        opset: version of ONNX's default domain in the file.
        nodes: number of ONNX nodes.
        model_bytes, data_bytes: file sizes.
        parameter_bytes: bytes of the Program's distinct parameters, for comparison.
        aliases: parameter name -> name under which its equal content is stored.
        comparisons: the checks in ONNX Runtime; empty without ``verify``.
        seconds: CPU seconds by stage.
        notes: what the reader should know, for instance why the direct emitter was not used.
    """

    path: Path
    data: Path | None
    companions: list[Path]
    producer: str
    opset: int
    nodes: int
    model_bytes: int
    data_bytes: int
    parameter_bytes: int
    aliases: dict[str, str]
    comparisons: list[Comparison] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        return bool(self.comparisons)

    @property
    def max_error(self) -> float:
        """Largest difference in any check; nan when nothing was checked."""
        return max((c.max_error for c in self.comparisons), default=float("nan"))

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        data = asdict(self) | {"max_error": self.max_error, "verified": self.verified}
        data["path"], data["companions"] = str(self.path), [str(p) for p in self.companions]
        data["data"] = str(self.data) if self.data else None
        return data

    def __str__(self) -> str:
        megabytes = (self.model_bytes + self.data_bytes) / 1e6
        lines = [f"{self.path}: opset {self.opset}, {self.nodes} nodes, {megabytes:.1f} MB ({self.producer})"]
        if self.verified:
            shapes = len({tuple(c.shapes.items()) for c in self.comparisons})
            lines.append(
                f"ONNX Runtime agrees on {shapes} input sets, optimisations off and on: max error {self.max_error:.2g}"
            )
        else:
            lines.append("not run in ONNX Runtime")
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])
