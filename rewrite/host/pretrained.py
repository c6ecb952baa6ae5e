"""A Program as a Transformers model: ``generate``, ``Trainer`` and everything else that takes a ``PreTrainedModel``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program

OnTaps = Callable[[dict[str, torch.Tensor]], None]
"""Called with the taps of a forward by name."""


def as_pretrained(program: Program, *, on_taps: OnTaps | None = None) -> Any:
    """A ``PreTrainedModel`` with ``GenerationMixin`` over the same tensors.

    State-dict keys are the source model's (plus what passes added), so checkpoints load back into the Program. Caches
    are ``DynamicCache`` objects with one layer a slot; blocks of a loop have slots of their own. A model with an encoder
    runs it in every step. Blocks are modules, as in :func:`hcx.rewrite.host.module.as_module`.

    Args:
        on_taps: called in every forward, so in every step of ``generate`` before the logits processors, with the taps of
            the positions that this forward computes; rows are those of the call. The attribute ``on_taps`` of the model,
            None computes no taps.

    Raises:
        UsageError: the program does not take ``input_ids``, or there is no configuration.
    """
    if program.signature.tokens is None or "logits" not in program.output_names:
        raise UsageError("as_pretrained() is for programs from `input_ids` to `logits`", where=program.signature.model)
    from .pretrained_model import HcxForCausalLM

    model = HcxForCausalLM(config_of(program), program)
    model.on_taps = on_taps
    return model


def config_of(program: Program) -> Any:
    from transformers import AutoConfig, PretrainedConfig

    model = program.reference.model if program.reference is not None else None
    if isinstance(getattr(model, "config", None), PretrainedConfig):
        return model.config
    if "config.json" not in program.companions:
        raise UsageError("the program has no Transformers configuration", where=program.signature.model,
                         hint="trace a Transformers model, or put its config.json into program.companions")  # fmt: skip
    data = json.loads(program.companions["config.json"])
    kind = data.pop("model_type", "")
    try:
        return AutoConfig.for_model(kind, **data)
    except ValueError:
        return PretrainedConfig(**data)
