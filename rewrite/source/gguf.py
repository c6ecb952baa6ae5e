"""GGUF files: dequantized into the transformers model of their architecture."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.errors import SourceError

from .files import wrapped
from .gguf_file import check_gguf
from .hf import check_fit
from .library import INSTALL, quiet, transformers
from .text import read_companions

_HINT = "convert the model to a Hugging Face folder, or use the original one"


def load_gguf(path: Path, *, dtype: torch.dtype | None) -> tuple[torch.nn.Module, Any, dict[str, bytes]]:
    """Load a GGUF file.

    transformers' own ``from_pretrained(gguf_file=...)`` is not used: it asks for the accelerate package without need
    and leaves a quantization entry in the config, with which the dequantized model could not be saved and loaded again.

    Returns:
        (model in eval mode, tokenizer or None, companion files as save_pretrained writes them).

    Raises:
        SourceError: damaged, or an architecture that transformers cannot read from GGUF.
    """
    package = transformers()
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise SourceError("reading GGUF needs the gguf package", where=str(path), hint=INSTALL) from error
    metadata = check_gguf(path)
    architecture = metadata.get("general.architecture", "(none)")
    with quiet(), wrapped(f"{path.name} of architecture {architecture} cannot be read", str(path), _HINT):
        config = package.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        model, info = _build(path, config, dtype)
    # the causal mask and rotary tables are buffers, not tensors of the file
    check_fit(model, info, path, strict=False)
    tokenizer = None
    if "tokenizer.ggml.model" in metadata:
        with quiet(), wrapped(f"the tokenizer inside {path.name} cannot be built", str(path), _HINT):
            # the file itself says how to tokenise; AutoTokenizer would read the whole header again to find a class
            tokenizer = package.PreTrainedTokenizerFast.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
    return model.eval(), tokenizer, _companions(model, tokenizer)


def _build(path: Path, config: Any, dtype: torch.dtype | None) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Dequantize into a state dict under the names of the config's class, then load that."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        skeleton = _skeleton(config)
    state = load_gguf_checkpoint(path, return_tensors=True, model_to_load=skeleton, torch_dtype=dtype)["tensors"]
    return type(skeleton).from_pretrained(
        None, config=config, state_dict=state, dtype=dtype or "auto", output_loading_info=True
    )


def _skeleton(config: Any) -> Any:
    """The model with its head, without memory for its weights: a GGUF file does not name the class."""
    package = transformers()
    for name in getattr(config, "architectures", None) or []:
        return getattr(package, name)(config)
    kinds = (package.AutoModelForSeq2SeqLM, package.AutoModelForCausalLM)
    for kind in kinds if config.is_encoder_decoder else kinds[::-1]:
        if type(config) in kind._model_mapping:
            return kind.from_config(config)
    return package.AutoModel.from_config(config)


def _companions(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """config.json, generation_config.json and tokenizer files, written by transformers into a folder and read back."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    with tempfile.TemporaryDirectory(prefix="hcx-gguf-") as folder, quiet():
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return read_companions(Path(folder))
