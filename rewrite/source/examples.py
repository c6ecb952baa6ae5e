"""An example call for a model, made from its config and its forward signature alone.

Batch and length differ (2 and 12, decoder 7), so that no later step can mistake one dimension for the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from hcx.rewrite.errors import SourceError, UsageError

from . import signals
from .files import first_line
from .inputs_file import GIVE_INPUTS
from .prose import PROSE
from .text import text_windows

BATCH, LENGTH, DECODER_LENGTH = 2, 12, 7


def from_model(model: Any, tokenizer: Callable[[], Any] | None, text: str | None) -> dict[str, torch.Tensor]:
    """Keyword arguments for a model that has ``main_input_name`` and ``config``, as those of transformers have.

    Args:
        model: the module; it is called only when it may read text and images together.
        tokenizer: builds its tokenizer, or None when there is none: then ids come from a fixed generator.
        text: the text to tokenise instead of the built-in paragraph.

    Returns:
        ``input_ids`` [2, 12], ``pixel_values`` [2, C, H, W], ``input_features`` [2, mels, frames] or ``input_values``
        [2, samples], with ``decoder_input_ids`` [2, 7] for encoder-decoders.

    Raises:
        SourceError: no example can be made for this kind of input.
    """
    maker = _Maker(model, tokenizer, text)
    main = str(getattr(model, "main_input_name", ""))
    if main not in maker.parameters or main not in _MAKERS or not hasattr(model, "config"):
        raise SourceError(
            f"no example call can be made for {type(model).__name__}",
            where=f"main input {main!r}" if main else "forward",
            hint=GIVE_INPUTS,
        )
    inputs = {main: _MAKERS[main](maker)}
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in maker.parameters:
        inputs["decoder_input_ids"] = maker.decoder_ids()
    other = {"input_ids": "pixel_values", "pixel_values": "input_ids"}.get(main)
    if other and other in maker.parameters and _failure(model, inputs):
        inputs[other] = _MAKERS[other](maker)
        if failure := _failure(model, inputs):
            raise SourceError(
                f"{type(model).__name__} does not run on text, nor on text with an image: {failure}",
                where="example inputs",
                hint=GIVE_INPUTS,
            )
    if text is not None and not maker.used_text:
        raise UsageError(
            "a text was given, and the model's example call has no use for it",
            where="text",
            hint="text needs a model that reads input_ids and a tokenizer beside it",
        )
    return inputs


def _failure(model: Any, inputs: dict[str, torch.Tensor]) -> str | None:
    """First line of what the model says about these inputs; None when it runs."""
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception as error:  # noqa: BLE001  any complaint of the user's model counts
        return first_line(error)
    return None


class _Maker:
    """Makes single inputs of one model."""

    def __init__(self, model: Any, tokenizer: Callable[[], Any] | None, text: str | None):
        self.model, self.text, self.used_text = model, text, False
        self.parameters = inspect.signature(model.forward).parameters
        self._build, self._tokenizer = tokenizer, None

    def input_ids(self) -> torch.Tensor:
        """int64 [2, 12]: two stretches of text."""
        positions = self._find("max_position_embeddings", "n_positions", "max_seq_len") or LENGTH + 2
        # some models keep the first two positions for padding
        length = LENGTH if positions >= LENGTH + 2 else max(3, positions - 2)
        return self._ids(length, 0, self._vocabulary())

    def decoder_ids(self) -> torch.Tensor:
        """int64 [2, 7], beginning with the start token if the config names one."""
        config = self.model.config
        inner = getattr(config, "decoder", None)
        vocabulary = getattr(config, "decoder_vocab_size", None) or getattr(inner, "vocab_size", None)
        ids = self._ids(DECODER_LENGTH, 1, vocabulary or self._vocabulary())
        start = getattr(config, "decoder_start_token_id", None)
        if isinstance(start, int):
            ids[:, 0] = start
        return ids

    def _ids(self, length: int, skip: int, vocabulary: int) -> torch.Tensor:
        """``skip`` moves the windows on, so that encoder and decoder read different parts."""
        if self._build is None:
            return self._random_ids(length, skip, vocabulary)
        self._tokenizer = self._tokenizer or self._build()
        ids = text_windows(self._tokenizer, self.text or PROSE, length, BATCH + skip)[skip:]
        if int(ids.max()) >= vocabulary:
            raise SourceError(
                f"the tokenizer gives id {int(ids.max())} and the model has {vocabulary} embeddings",
                where="tokenizer files",
                hint="put the tokenizer of this very model beside it",
            )
        self.used_text = True
        return ids

    def _random_ids(self, length: int, seed: int, vocabulary: int) -> torch.Tensor:
        """Ids from a fixed generator, without the special ones that some models look for."""
        special = {self._find(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id")}
        allowed = torch.tensor([index for index in range(vocabulary) if index not in special] or [0])
        generator = torch.Generator().manual_seed(seed)
        return allowed[torch.randint(len(allowed), (BATCH, length), generator=generator)]

    def _vocabulary(self) -> int:
        try:
            table = self.model.get_input_embeddings()
        except (NotImplementedError, AttributeError):  # models whose first layer is no table of tokens
            table = None
        size = getattr(table, "num_embeddings", None) or self._find("vocab_size")
        if not isinstance(size, int):
            raise SourceError(
                f"{type(self.model).__name__} reads token ids and names no vocabulary size",
                where="config.vocab_size",
                hint=GIVE_INPUTS,
            )
        return size

    def pixel_values(self) -> torch.Tensor:
        """[2, channels, height, width] in the config's size, or 224 where the model takes any."""
        size = self._find("image_size") or 224
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        return signals.images(BATCH, self._find("num_channels") or 3, height, width).to(self._float())

    def input_features(self) -> torch.Tensor:
        """[2, mel bins, frames], two frames for each position of the encoder; or [2, 48, features of a frame]."""
        if isinstance(width := self._find("input_feat_per_channel"), int):
            return signals.log_mels(BATCH, width, 48).transpose(1, 2).contiguous().to(self._float())
        mels, positions = self._find("num_mel_bins"), self._find("max_source_positions")
        if not isinstance(mels, int) or not isinstance(positions, int):
            raise SourceError(
                f"{type(self.model).__name__} reads audio features of unknown size",
                where="config.num_mel_bins, config.max_source_positions",
                hint=GIVE_INPUTS,
            )
        return signals.log_mels(BATCH, mels, 2 * positions).to(self._float())

    def input_values(self) -> torch.Tensor:
        """[2, 8000], half a second of sound; or [2, frames, mels] where the config names mel bins."""
        mels, frames = self._find("num_mel_bins"), self._find("max_length")
        if isinstance(mels, int) and isinstance(frames, int):
            return signals.log_mels(BATCH, mels, frames).transpose(1, 2).contiguous().to(self._float())
        return signals.tones(BATCH, 8000).to(self._float())

    def _float(self) -> torch.dtype:
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)

    def _find(self, *names: str) -> Any:
        """The first of these config values, in the config or in its parts for text, vision and audio."""
        config = self.model.config
        parts = [config, *(getattr(config, part, None) for part in ("text_config", "vision_config", "encoder"))]
        values = (getattr(part, name, None) for name in names for part in parts if part is not None)
        return next((value for value in values if value is not None), None)


_MAKERS: dict[str, Callable[[_Maker], torch.Tensor]] = {
    "input_ids": _Maker.input_ids,
    "pixel_values": _Maker.pixel_values,
    "input_features": _Maker.input_features,
    "input_values": _Maker.input_values,
}
