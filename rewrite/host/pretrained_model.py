"""The class behind :func:`hcx.rewrite.host.pretrained.as_pretrained`; it is imported on first use, as Transformers is."""

from __future__ import annotations

import copy
import json
from typing import Any, ClassVar

import torch
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import Fill
from hcx.rewrite.run.reading import observe
from hcx.rewrite.sites.finder import find
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from .module import ProgramModule, as_module
from .pretrained_cache import from_flat, to_flat


class _Source(torch.nn.Module):
    """Stands where `generate` expects an encoder and passes its input on: the Program's graph encodes it itself."""

    def __init__(self, main_input_name: str):
        super().__init__()
        self.main_input_name = main_input_name

    def forward(self, **kwargs: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=kwargs[self.main_input_name])


def _shifted(labels: torch.Tensor, config: Any) -> torch.Tensor:
    """Decoder tokens for these labels: one step later, after the start token."""
    start = torch.full_like(labels[:, :1], config.decoder_start_token_id)
    return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, config.pad_token_id)], 1)


class HcxForCausalLM(PreTrainedModel, GenerationMixin):
    """A rewritten decoder; see :func:`as_pretrained`."""

    program: Program
    module: ProgramModule
    _source: _Source | None

    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["BlockModule"]
    _supports_sdpa = _supports_flex_attn = True  # the graph has what the source was traced with

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # Transformers asks where the configuration names one, grouped by default

    def __init__(self, config: Any, program: Program):
        super().__init__(config)
        module = as_module(program)
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = module.__dict__[name]
        self.__dict__.update(program=program, module=module, on_taps=None)
        groups = program.tied_groups()
        self._tied_weights_keys = {name: group[0] for group in groups for name in group[1:]}
        self.all_tied_weights_keys = dict(self._tied_weights_keys)
        self.training = program.training
        self.__dict__["_source"] = None
        if program.signature.tokens == "decoder_input_ids":
            self.main_input_name = next(
                s.name for s in program.inputs if s.fill is None and s.name != "decoder_input_ids"
            )
            self.__dict__["_source"] = _Source(self.main_input_name)
        self._is_stateful = any(s.fill == Fill.EMPTY and "past" not in s.shape for s in program.inputs)
        source = getattr(getattr(program.reference, "model", None), "generation_config", None)
        if source is not None:
            self.generation_config = copy.deepcopy(source)
        elif "generation_config.json" in program.companions:
            stored = json.loads(program.companions["generation_config.json"])
            self.generation_config = GenerationConfig.from_dict(stored)
        if not program.signature.has_cache:  # else `generate` passes on the last token alone
            self.generation_config.use_cache = False

    def train(self, mode: bool = True) -> HcxForCausalLM:
        self.program.train(mode)
        self.module.train(mode)
        self.training = mode
        return self

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass

    def forward(self, input_ids: Tensor | None = None, attention_mask: Any = None, position_ids: Tensor | None = None,
                cache: Any = None, past_key_values: Any = None,
                labels: Tensor | None = None, use_cache: bool | None = None,
                output_hidden_states: bool | None = None, logits_to_keep: int | Tensor = 0,
                decoder_input_ids: Tensor | None = None,
                decoder_attention_mask: Tensor | None = None,
                encoder_outputs: Any = None, **kwargs: Any) -> CausalLMOutputWithPast:  # fmt: skip
        cache = cache if cache is not None else past_key_values
        if labels is not None and self._source is not None and decoder_input_ids is None:
            decoder_input_ids = _shifted(labels, self.config)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, **kwargs,
                 "decoder_input_ids": decoder_input_ids, "decoder_attention_mask": decoder_attention_mask}  # fmt: skip
        if self._source is not None and encoder_outputs is not None:
            given[self.main_input_name] = encoder_outputs[0]
        past = {} if cache is None else to_flat(cache)
        given = {n: t for n, t in given.items() if isinstance(t, torch.Tensor)}
        flat = self.program.signature.by_name({**given, **past})
        values = self.module.run_flat(flat, taps=self.on_taps is not None)
        outputs = dict(zip(self.program.output_names, values, strict=self.on_taps is None))
        if self.on_taps is not None:
            self.on_taps(dict(zip(self.program.taps, values[len(outputs) :], strict=True)))
        logits = outputs["logits"]
        if isinstance(logits_to_keep, int) and logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        loss = None
        if labels is not None:
            more = {k: v for k, v in kwargs.items() if k == "num_items_in_batch"}
            if self._source is not None:
                more["shift_labels"] = labels  # the decoder's tokens are moved already
            loss = ForCausalLMLoss(logits=logits, labels=labels, vocab_size=logits.shape[-1], **more)
        hidden = self._hidden(flat) if output_hidden_states else None
        kept = use_cache is not False and self.program.signature.has_cache and not self.training
        present = {n.removeprefix("present."): t for n, t in outputs.items() if n.startswith("present.")}
        return CausalLMOutputWithPast(loss, logits, from_flat(cache, present) if kept else None, hidden)

    def _hidden(self, flat: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The stream at every boundary of the original blocks; several streams are reduced first."""
        stack = find(self.program).main
        boundaries = [stack.boundary(k) for k in range(stack.depth + 1)]
        values = observe(self.program, [b.node for b in boundaries], flat)
        return tuple(v if b.carrier.kind == "plain" else v.mean(0) for v, b in zip(values, boundaries, strict=True))

    @property
    def encoder(self) -> _Source:
        """What `generate` asks for the encoder's output; see :class:`_Source`."""
        if self._source is None:
            raise AttributeError("encoder")
        return self._source

    def get_encoder(self, modality: Any = None) -> torch.nn.Module:
        return self if self._source is None else self._source
