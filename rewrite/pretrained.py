"""A Program as a Transformers model: ``generate``, ``Trainer`` and everything else that takes a ``PreTrainedModel``."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import torch

from .errors import UsageError
from .observe import observe
from .program import Program
from .signature import CACHE


def as_pretrained(program: Program):
    """A ``PreTrainedModel`` with ``GenerationMixin`` over the same tensors.

    State-dict keys are the source model's (plus what passes added), so checkpoints load back into the Program. Caches
    are ``DynamicCache`` objects with one layer a slot; blocks of a loop have slots of their own. Blocks are modules, as in
    :func:`hcx.rewrite.module.as_module`.

    Raises:
        UsageError: the program does not take ``input_ids``, or there is no configuration.
    """
    if "input_ids" not in [i.name for i in program.inputs] or "logits" not in program.output_names:
        raise UsageError("as_pretrained() is for programs from `input_ids` to `logits`", where=program.signature.model)
    return _model_class()(_config(program), program)


def _config(program: Program):
    from transformers import AutoConfig, PretrainedConfig

    model = getattr(program.reference, "model", None)
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


@cache
def _model_class():
    from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class HcxForCausalLM(PreTrainedModel, GenerationMixin):
        """A rewritten decoder; see :func:`as_pretrained`."""

        main_input_name = "input_ids"
        supports_gradient_checkpointing = True
        _no_split_modules = ["BlockModule"]
        _supports_sdpa = True

        def __init__(self, config: Any, program: Program):
            super().__init__(config)
            module = program.as_module()
            for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                self.__dict__[name] = module.__dict__[name]
            self.__dict__.update(program=program, module=module)
            groups = program.tied_groups()
            self._tied_weights_keys = {name: group[0] for group in groups for name in group[1:]}
            self.all_tied_weights_keys = dict(self._tied_weights_keys)
            self.training = program.training
            source = getattr(getattr(program.reference, "model", None), "generation_config", None)
            if source is not None:
                self.generation_config = copy.deepcopy(source)
            elif "generation_config.json" in program.companions:
                stored = json.loads(program.companions["generation_config.json"])
                self.generation_config = GenerationConfig.from_dict(stored)

        def train(self, mode: bool = True):
            self.program.train(mode)
            self.module.train(mode)
            self.training = mode
            return self

        def _init_weights(self, module: torch.nn.Module) -> None:
            pass

        def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, past_key_values=None,
                    labels=None, use_cache=None, output_hidden_states=None, logits_to_keep=0, **kwargs):  # fmt: skip
            cache = cache if cache is not None else past_key_values
            flat = self._inputs(input_ids, attention_mask, position_ids, cache)
            outputs = dict(zip(self.program.output_names, self.module.run_flat(flat), strict=True))
            logits = outputs["logits"]
            if isinstance(logits_to_keep, int) and logits_to_keep:
                logits = logits[:, -logits_to_keep:]
            loss = None
            if labels is not None:
                batch_items = {k: v for k, v in kwargs.items() if k == "num_items_in_batch"}
                loss = ForCausalLMLoss(logits=logits, labels=labels, vocab_size=logits.shape[-1], **batch_items)
            hidden = self._hidden(flat) if output_hidden_states else None
            kept = use_cache is not False and self.program.signature.has_cache and not self.training
            return CausalLMOutputWithPast(loss, logits, self._cache(cache, outputs) if kept else None, hidden)

        def _inputs(self, input_ids, attention_mask, position_ids, cache) -> list[torch.Tensor]:
            signature = self.program.signature
            past = {} if cache is None else _flat_cache(cache)
            length = next(iter(past.values())).shape[-2] if past else 0
            batch, new = input_ids.shape
            if attention_mask is None:
                attention_mask = input_ids.new_ones(batch, length + new)
            if position_ids is None:
                position_ids = torch.arange(length, length + new, device=input_ids.device).expand(batch, new)
            given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, **past}
            flat = [given[s.name].to(s.dtype) if s.name in given else None for s in signature.inputs]
            sizes = {"batch": batch, "sequence": new, "past": length}
            return [
                t if t is not None else _empty(s, sizes, input_ids.device)
                for t, s in zip(flat, signature.inputs, strict=True)
            ]

        def _hidden(self, flat: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            """The stream at every boundary of the original blocks; several streams are reduced first."""
            stack = self.program.sites().main
            boundaries = [stack.boundary(k) for k in range(stack.depth + 1)]
            values = observe(self.program, [b.node for b in boundaries], flat)
            return tuple(v if b.carrier.kind == "plain" else v.mean(0) for v, b in zip(values, boundaries, strict=True))

        def _cache(self, cache, outputs: dict[str, torch.Tensor]):
            cache = cache if cache is not None else DynamicCache()
            present = {n.removeprefix("present."): t for n, t in outputs.items() if n.startswith("present.")}
            for number in range(1 + max(int(n.split(".")[0]) for n in present)):
                if number == len(cache.layers):
                    from transformers.cache_utils import DynamicLayer

                    cache.layers.append(DynamicLayer())
                layer = cache.layers[number]
                layer.keys, layer.values = present[f"{number}.key"], present[f"{number}.value"]
                layer.device, layer.dtype, layer.is_initialized = layer.keys.device, layer.keys.dtype, True
            return cache

    return HcxForCausalLM


def _flat_cache(cache: Any) -> dict[str, torch.Tensor]:
    found = {}
    for number, layer in enumerate(cache.layers):
        if getattr(layer, "is_initialized", False) and layer.keys is not None and layer.keys.numel():
            found[f"{CACHE}.{number}.key"], found[f"{CACHE}.{number}.value"] = layer.keys, layer.values
    return found


def _empty(spec: Any, sizes: dict[str, int], device: torch.device) -> torch.Tensor:
    from .signature import size_of

    if spec.fill is None:
        raise UsageError(f"the program also needs the input `{spec.name}`", where="as_pretrained")
    return torch.ones([size_of(d, sizes) for d in spec.shape], dtype=spec.dtype, device=device)
