"""Draws model classes of the installed Transformers at random and says what hcx makes of each, failures included.

python bench/random_architectures.py [SEED] [COUNT]      # a table, one row a class
python bench/random_architectures.py --class NAME ...    # these classes
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
SEED = 20261130
HEADS = ("ForCausalLM", "ForMaskedLM", "ForImageClassification", "ForConditionalGeneration")
MAPPINGS = "CAUSAL_LM MASKED_LM IMAGE_CLASSIFICATION SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ IMAGE_TEXT_TO_TEXT".split()
SMALL = {
    "vocab": 128, "hidden_size": 32, "attention_hidden_size": 64, "d_model": 32, "n_embd": 32, "embed_dim": 32,
    "dim": 32, "width": 32, "emb_dim": 32, "word_embed_proj_dim": 32, "embedding_size": 32, "d_ff": 64, "ffn_dim": 64,
    "intermediate": 64, "inner": 64, "head_dim": 8,
    "d_kv": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "rank": 8, "rope_head_dim": 8, "rotary_dim": 8,
    "key_value_heads": 2, "kv_heads": 2, "num_heads": 4, "attention_heads": 4, "n_head": 4, "n_heads": 4,
    "layers": 4, "n_layer": 4, "num_blocks": 4, "experts_per_tok": 2, "experts": 4, "position": 64, "n_ctx": 64,
    "state_size": 8, "image_size": 32, "patch_size": 8, "mel_bins": 8, "source_positions": 12, "chunk_size": 8,
}  # fmt: skip
"""Part of a config field's name -> its value; the longest part that fits wins."""


def shrink(config: Any, depth: int) -> None:
    """Make the numeric fields of a default config small, the ones of inner configs too; never larger than they were."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value, depth)
        elif isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
            setattr(config, name, type(value)(shrunk_list(name, value)))
        elif type(value) is int and value > 1 and not name.endswith(("_token_id", "_id")):
            new = shrunk(name, value, depth)
            if new != value:
                with contextlib.suppress(AttributeError):  # a field that follows from others
                    setattr(config, name, new)
        elif name.endswith("_token_id") and type(value) is int and value >= 128:
            setattr(config, name, 2)
    layers = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layer_types", None)
    if isinstance(layers, int) and isinstance(kinds, list):
        with contextlib.suppress(AttributeError):
            config.layer_types = kinds[:layers]


def shrunk(name: str, value: int, depth: int) -> int:
    fits = [part for part in SMALL if part in name]
    if not fits:
        return value
    part = max(fits, key=len)
    return min(value, depth if "layer" in part else SMALL[part])


def shrunk_list(name: str, value: list[int]) -> list[int]:
    if "depth" in name or "layers" in name or "blocks" in name:
        return [min(v, 2) for v in value]
    if any(part in name for part in ("hidden_size", "dim", "channel", "width")):
        return [min(v, 16 * (i + 1)) for i, v in enumerate(value)]
    return [min(v, 4) for v in value] if "head" in name else value


def layers(branches: int, blocks: str = "num_hidden_layers") -> Callable[[Any], tuple[int, int]]:
    """Count of a stack of equal layers: (blocks, branches) from the config."""

    def count(config: Any) -> tuple[int, int]:
        text = getattr(config, "text_config", None) or config
        number = getattr(text, blocks)
        number = sum(number) if isinstance(number, list | tuple) else number
        return number, number * branches

    return count


def encoder_decoder(config: Any) -> tuple[int, int]:
    """Attention and MLP a layer of the encoder; self-attention, cross-attention and MLP a layer of the decoder."""
    return config.encoder_layers + config.decoder_layers, 2 * config.encoder_layers + 3 * config.decoder_layers


COUNTED: dict[str, Callable[[Any], tuple[int, int]]] = {
    # seed 20261130
    "Zamba": layers(1),  # the shared transformer is added to what the Mamba reads, not to the stream
    "ProphetNetForCausalLM": layers(2, "num_decoder_layers"),  # without an encoder no cross-attention
    "BlenderbotSmall": encoder_decoder,
    # attention is added in the layers that do not start a group, the experts in all
    "Inkling2For": lambda c: (
        n := c.text_config.num_hidden_layers,
        2 * n - len(range(0, n, c.text_config.n_layers_per_attn_res_block)),
    ),
    "Jais2": layers(2),
    "HYV3": layers(2),
    "Cohere": layers(2),  # one add with two branches in parallel
    "VibeVoice": layers(2),
    "Segformer": layers(2, "depths"),
    # seed 77
    "Glm4": layers(2),
    "Idefics2": layers(2),
    "FalconMamba": layers(1),
    "FSMT": encoder_decoder,
    "Dbrx": layers(2, "n_layers"),
    "GraniteSpeech": layers(2),
    "MobileNetV2": lambda config: (10, 10),  # 16 inverted residuals, 10 of stride 1 between equal widths
    "PaliGemma": layers(2),
    "Qwen3Next": layers(2),
    "Gemma4For": layers(3),  # the third one adds the per-layer input
    "DistilBert": layers(2, "n_layers"),
}
"""Start of a class's name -> (blocks, branches) that its modelling code adds to a stream, read off by hand from the
source and from nothing that hcx computes. Only text goes in, so towers for pictures and sound do not count."""


def expected(name: str, config: Any) -> tuple[int, int] | None:
    """Counts by hand, None for classes that nobody has counted."""
    start = max((n for n in COUNTED if name.startswith(n)), key=len, default=None)
    return COUNTED[start](config) if start else None


def classes() -> list[str]:
    """Names of all model classes with one of the heads."""
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for mapping in MAPPINGS:
        for names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            found.update([names] if isinstance(names, str) else names)
    return sorted(n for n in found if n.endswith(HEADS))


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """A tiny random model of a class and its example arguments."""
    import torch
    import transformers

    cls = getattr(transformers, name)
    for depth in (4, 12):  # hybrids may need more layers until each kind of layer is there
        config = cls.config_class()
        shrink(config, depth)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        torch.manual_seed(0)
        try:
            model = cls(config).eval()
        except Exception:
            if depth == 12:
                raise
            continue
        return model, inputs(model, config)
    raise AssertionError("unreachable")


def inputs(model: Any, config: Any) -> dict[str, Any]:
    """Example arguments from the main input's name."""
    import torch

    main, text = model.main_input_name, torch.randint(3, 100, (2, 9))
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    made: dict[str, Any] = {"input_ids": text}
    if main == "pixel_values":
        made = {main: torch.randn(2, getattr(config, "num_channels", 3), size, size)}
    elif main in ("input_features", "input_values"):
        frames = 2 * getattr(config, "max_source_positions", 12)
        shape = (2, getattr(config, "num_mel_bins", 8), frames) if main == "input_features" else (2, 800)
        made = {main: torch.randn(shape)}
    if getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = torch.randint(3, 100, (2, 6))
    return made


def row(name: str) -> dict[str, str]:
    """What hcx makes of one class; every failure is a cell."""
    from hcx.rewrite import trace

    names = "class", "traced", "found", "expected", "as counted", "kinds", "stacks", "runs", "looped,exits", "seconds"
    cells = dict.fromkeys(names, "-")
    cells["class"], start = name, time.process_time()
    try:
        model, arguments = build(name)
        model(**arguments)
    except Exception as error:  # noqa: BLE001  any error is a cell of the table
        cells["traced"] = f"not built by the shrinker: {short(error)}"
        return cells
    counted = expected(name, model.config)
    cells["expected"] = f"{counted[0]} blocks, {counted[1]} branches" if counted else "not counted"
    try:
        program = trace(model, (), arguments, cache=False)
        cells["traced"] = {True: "bitwise", False: "rounding", None: "yes"}[program.trace_exact]
        sites = program.sites()
        kinds = [b.kind for b in sites.branches()]
        found = sum(len(s.blocks) for s in sites.stacks), len(kinds)
        cells["found"] = f"{found[0]} blocks, {found[1]} branches"
        cells["as counted"] = "-" if counted is None else "yes" if found == counted else "NO"
        cells["kinds"] = " ".join(f"{k}:{kinds.count(k)}" for k in sorted(set(kinds)))
        cells["stacks"] = " ".join(f"{s.label}={len(s.blocks)}" for s in sites.stacks)
        cells["runs"] = " ".join(str(len(r)) for s in sites.stacks for r in s.runs)
    except Exception as error:  # noqa: BLE001  any error is a cell of the table
        cells["traced" if cells["traced"] == "-" else "found"] = short(error)
        cells["as counted"] = "FAILED"
        cells["seconds"] = f"{time.process_time() - start:.1f}"
        return cells
    for pipeline in ("looped,exits",):
        try:
            program.rewrite(pipeline, allow_partial=True)
            cells[pipeline] = "ok"
        except Exception as error:  # noqa: BLE001  any error is a cell of the table
            cells[pipeline] = short(error)
    cells["seconds"] = f"{time.process_time() - start:.1f}"
    return cells


def short(error: Exception) -> str:
    where = f" [{error.where}]" if getattr(error, "where", None) else ""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:150]}{where[:150]}"


def main(argv: list[str]) -> int:
    """Print the table."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if argv[:1] == ["--class"]:
        drawn = argv[1:]
    else:
        seed, count = (int(a) for a in [*argv, *(str(SEED), "10")[len(argv) :]])
        drawn = random.Random(seed).sample(classes(), count)
        print(f"seed {seed}, {count} of {len(classes())} classes")
    rows = []
    for number, name in enumerate(drawn):
        rows.append(cells := row(name))
        if number == 0:
            print(f"\n| {' | '.join(cells)} |\n|{'---|' * len(cells)}", flush=True)
        print(f"| {' | '.join(cells.values())} |", flush=True)
    tally = {answer: sum(r["as counted"] == answer for r in rows) for answer in ("yes", "NO", "FAILED", "-")}
    print(f"\n{tally['yes']} of {len(rows)} as counted, {tally['NO']} otherwise, {tally['FAILED']} failed in hcx, "
          f"{tally['-']} not built or not counted; looped,exits applied and checked on "
          f"{sum(r['looped,exits'] == 'ok' for r in rows)}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
